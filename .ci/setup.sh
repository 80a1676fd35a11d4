#!/usr/bin/env bash
# Make the development environment .venv, or leave it alone if it is up to date. Other scripts source this file.
#
# torch goes first, alone and pinned: whatever is installed after it then finds it there, and asks for no other build.
# The versions are those of constraints.txt. PYTHON=... chooses another interpreter for a new environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
stamp=.venv/.installed

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
        if "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "No Python 3.10 or newer with the venv module was found. Install one, or name it: PYTHON=/path/to/python" >&2
    return 1
}

# timm brings torchvision along. Where that is built for another torch than the one here (its public builds need CUDA's), it fails to
# import, and everything that looks for it fails too, Lightning among them. Nothing but tests of timm wants it.
drop_unusable_torchvision() {
    if ! "$python" -c 'import torchvision' 2>/dev/null; then
        echo "  torchvision does not work with this build of torch: left out"
        "$python" -m pip uninstall -qq --yes torchvision
    fi
}

set_up() {
    local wanted name install
    # The place belongs to it too: an environment that was moved still points to where it was made.
    wanted="$(cat pyproject.toml constraints.txt .ci/setup.sh | cksum) $PWD"
    if [[ -x $python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    rm -f "$stamp"
    if [[ ! -x $python ]] || ! "$python" -m pip --version >/dev/null 2>&1; then
        name="$(find_python)"
        echo "Setting up .venv with $("$name" --version), once; this takes a few minutes"
        rm -rf .venv
        "$name" -m venv .venv
    else
        echo "Updating .venv"
    fi
    install=("$python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt)
    echo "  torch, pinned"
    "${install[@]}" torch
    echo "  hiremate-lightning and what it needs"
    "${install[@]}" --editable ".[dev,models,examples,docs]"
    drop_unusable_torchvision
    echo "$wanted" >"$stamp"
    echo "  done in $SECONDS s"
}

set_up
