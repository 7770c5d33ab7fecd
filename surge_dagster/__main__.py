"""The command line as a module: `python -m surge_dagster` is `surge-dagster`."""

from surge_dagster.commands.cli import main

if __name__ == "__main__":
    main()
