"""Where the shop's own assets are stored, and how their steps run."""

import os

import dagster as dg


@dg.definitions
def location() -> dg.Definitions:
    values = dg.FilesystemIOManager(base_dir=os.environ["SHOP_DATA"])
    return dg.Definitions(resources={"io_manager": values}, executor=dg.in_process_executor)
