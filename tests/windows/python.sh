#!/usr/bin/env bash
# Runs a Windows Python under Wine: WIN=FOLDER python.sh ARGUMENTS…   setup.sh makes FOLDER.
# Output goes through a pipe: with a file as standard output this Python does not start there. Nobody waits for the end
# of that pipe, which Wine's own services keep open.
set -uo pipefail
: "${WIN:?the folder that setup.sh made}"
export WINEPREFIX="$WIN/prefix" WINEARCH=win64 WINEDEBUG="${WINEDEBUG--all}"
export WINEDLLOVERRIDES="mscoree=d;mshtml=d;winemenubuilder.exe=d;winedbg.exe=d" # a crash ends the process
export KMP_AFFINITY=disabled OMP_NUM_THREADS=1 # torch's OpenMP asks Wine for what it lacks
wine "$WIN/python/python.exe" "$@" </dev/null > >(cat) 2>&1
status=$?
sleep 0.5 # for the last lines
exit "$status"
