#!/bin/sh
# Install Debian's Chromium for the test of the session console, if it can be done: as root, on a Debian. It never
# fails: without a browser that test is skipped, and says so.
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo '== no browser (chromium, chromedriver): the test of the session console will be skipped'
    exit 0
fi
echo "== Debian's chromium, for the test of the session console (about half a minute)"
export DEBIAN_FRONTEND=noninteractive
{ timeout 120 apt-get update && timeout 300 apt-get install -y --no-install-recommends chromium chromium-driver; } \
    >/dev/null 2>&1 || echo '   (it could not be installed: the test will be skipped)'
exit 0
