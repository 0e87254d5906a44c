#!/usr/bin/env bash
# Apptainer, and a root file system to make images from, below /var/tmp, where this is root on Debian; nothing otherwise.
# Debian 12 has no Apptainer. That of unstable needs a newer libc, so it runs here on a libc of its own.
set -euo pipefail
here=/var/tmp/draftstates-apptainer
if [ -e "$here/done" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || [ "$(uname -m)" != x86_64 ]; then exit 0; fi
if [ "${1:-}" != now ]; then
    # in a process of its own: what fails ends that one alone
    bash "$0" now || echo "Apptainer cannot be installed here: the tests of containers will be skipped" >&2
    exit 0
fi
rm -rf "$here"
mkdir -p "$here"/{apt/lists/partial,debs,root}
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
apt-get install --yes --quiet --quiet --no-install-recommends mmdebstrap patchelf squashfs-tools squashfuse
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Label: Debian' 'Component: main' 'Identifier: Packages' | sort -u | head -n 1)
if [ -z "$mirror" ]; then
    echo "no mirror of Debian among apt's sources: the tests of containers will be skipped" >&2
    exit 0
fi

install_apptainer() {
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$here/apt/sources.list"
    local unstable=(-o "Dir::Etc::SourceList=$here/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$here/apt/lists"
        -o "Dir::Cache=$here/apt" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
    apt-get "${unstable[@]}" update --quiet --quiet
    (cd "$here/debs" && apt-get "${unstable[@]}" download --quiet --quiet apptainer libc6 libseccomp2 libsqlite3-0)
    dpkg -x "$here"/debs/apptainer_*.deb "$here"
    for name in libc6 libseccomp2 libsqlite3-0; do dpkg -x "$here"/debs/"$name"_*.deb "$here/glibc"; done
    local libraries=$here/glibc/usr/lib/x86_64-linux-gnu
    for program in usr/bin/apptainer usr/lib/x86_64-linux-gnu/apptainer/bin/starter; do
        # rpath, not runpath, which the libraries' own libraries would not inherit
        patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" "$here/$program"
    done
    # it looks for these relative to itself
    ln -sfn ../etc "$here/usr/etc"
    ln -sfn ../../etc "$here/usr/lib/etc"
    ln -sfn apptainer "$here/usr/bin/singularity" # as Apptainer's own packages have it: what spython calls
    mkdir -p "$here"/usr/{,lib/}var/lib/apptainer/mnt/session
    # a virtual machine's root may lack a capability, and Apptainer asks for all
    sed -i 's/^root default capabilities = full/root default capabilities = no/' "$here/etc/apptainer/apptainer.conf"
}

# Python and what its packages link to, unpacked and not configured: that is enough, and takes seconds instead of minutes.
make_root() {
    mmdebstrap --quiet --variant=extract --include=bash,coreutils,dash,base-files,libstdc++6,python3,python3-venv,util-linux bookworm "$here/root" "$mirror"
    rm -rf "$here"/root/dev/* # device nodes cannot be copied in a user namespace
    mkdir -p "$here"/root/{wheels,mnt,opt}
    # an image is built without network: its lock is cut down to what lies here
    printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$here/root/etc/pip.conf"
}

install_apptainer
make_root
chmod -R go+rX "$here"
rm -rf "$here"/{apt,debs}
touch "$here/done"
