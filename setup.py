"""The packages: surge_dagster, with the folders assets/ and resources/ inside it.

Those two folders lie at the top of the repository and are imported as surge_dagster.assets and
surge_dagster.resources: top-level packages of these names would collide with those of other Dagster
projects. setuptools finds all packages, but it needs to know where these two belong.
"""

from setuptools import find_packages, setup

MOUNTED = ("assets", "resources")

package_dir = {"surge_dagster": "surge_dagster"}
packages = find_packages(include=["surge_dagster", "surge_dagster.*"])
for folder in MOUNTED:
    package_dir[f"surge_dagster.{folder}"] = folder
    packages.append(f"surge_dagster.{folder}")

setup(packages=packages, package_dir=package_dir)
