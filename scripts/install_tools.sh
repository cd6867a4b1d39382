#!/bin/sh
# Install Debian's nginx for the test of the scale-out configuration, if it can be done: as root, on a Debian that
# starts no service by itself (container images have policy-rc.d for that). It never fails: without nginx that test is
# skipped, and says so.
if [ -x /usr/sbin/nginx ] || command -v nginx >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || ! [ -x /usr/sbin/policy-rc.d ]; then
    echo '== no nginx: the test of scale-out will be skipped'
    exit 0
fi
echo "== Debian's nginx, for the test of scale-out (a few seconds)"
export DEBIAN_FRONTEND=noninteractive
{ timeout 120 apt-get update && timeout 120 apt-get install -y --no-install-recommends nginx-light; } \
    >/dev/null 2>&1 || echo '   (it could not be installed: the test will be skipped)'
exit 0
