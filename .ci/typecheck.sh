#!/usr/bin/env bash
# Check the types of the package, as it installs.
#
# mypy reads folders, not package-dir mappings: in the checkout it would miss hiremate_lightning.callbacks. So it reads a
# copy in which the callbacks lie where an installed package has them.
source "$(dirname "$0")/setup.sh" all
root=$PWD
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -R hiremate_lightning "$copy/hiremate_lightning"
cp -R callbacks "$copy/hiremate_lightning/callbacks"
cd "$copy"
MYPYPATH=$copy "$root/$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" \
    --package hiremate_lightning
