#!/usr/bin/env bash
# A Slurm cluster of this one machine, without systemd, as root: `slurm.sh start`, `slurm.sh stop`.
# Needs what install.sh installs.
set -euo pipefail
here=/var/tmp/draftstates-slurm
node=$(hostname -s)

write_configuration() {
    mkdir -p "$here"/{ctld,d,log,run} /etc/slurm
    touch "$here"/gpu{0,1} # Slurm hands them out and never opens them
    cat >"$here/slurm.conf" <<END
ClusterName=tests
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MinJobAge=3600
KillWait=5
SlurmctldPidFile=$here/run/slurmctld.pid
SlurmdPidFile=$here/run/slurmd.pid
SlurmdSpoolDir=$here/d
StateSaveLocation=$here/ctld
SlurmctldLogFile=$here/log/slurmctld.log
SlurmdLogFile=$here/log/slurmd.log
SlurmctldPort=16817
SlurmdPort=16818
GresTypes=gpu
# more of everything than the machine may have: the jobs of these tests are small
SlurmdParameters=config_overrides
NodeName=$node NodeAddr=127.0.0.1 CPUs=16 RealMemory=64000 Gres=gpu:test:2 State=UNKNOWN
PartitionName=cpu Nodes=$node Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=$node MaxTime=INFINITE State=UP
END
    echo "NodeName=$node Name=gpu Type=test File=$here/gpu[0-1]" >"$here/gres.conf"
    echo "CgroupPlugin=cgroup/v1" >"$here/cgroup.conf"
    # Snakemake's plug-in removes SLURM_CONF from the environment with all else that begins so
    for name in slurm gres cgroup; do ln -sf "$here/$name.conf" "/etc/slurm/$name.conf"; done
}

runs() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

start() {
    getent hosts "$node" >/dev/null || echo "127.0.0.1 $node" >>/etc/hosts # srun calls back by name
    if [ -e /etc/slurm/slurm.conf ] && [ "$(readlink /etc/slurm/slurm.conf)" != "$here/slurm.conf" ]; then
        echo "/etc/slurm/slurm.conf belongs to another cluster" >&2
        exit 1
    fi
    write_configuration
    if ! runs /run/munge/munged.pid; then
        install -d -o munge -g munge -m 0755 /run/munge /var/log/munge
        install -d -o munge -g munge -m 0711 /var/lib/munge
        if [ ! -s /etc/munge/munge.key ]; then
            install -o munge -g munge -m 0400 <(head -c 1024 /dev/urandom) /etc/munge/munge.key
        fi
        touch "$here/munge-is-ours"
        setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged
    fi
    runs "$here/run/slurmctld.pid" || slurmctld -c
    runs "$here/run/slurmd.pid" || slurmd -N "$node"
    for _ in $(seq 100); do
        if [ "$(sinfo --noheader --partition cpu --format %t 2>/dev/null)" = idle ]; then return; fi
        sleep 0.2
    done
    tail -n 20 "$here"/log/*.log >&2
    exit 1
}

stop() {
    scancel --user root 2>/dev/null || true
    files=("$here/run/slurmd.pid" "$here/run/slurmctld.pid")
    if [ -e "$here/munge-is-ours" ]; then files+=(/run/munge/munged.pid); fi
    for file in "${files[@]}"; do
        if runs "$file"; then kill "$(cat "$file")"; fi
        for _ in $(seq 100); do
            runs "$file" || break
            sleep 0.1
        done
    done
    rm -rf "$here" /etc/slurm/{slurm,gres,cgroup}.conf
}

case "${1:-}" in
start) start ;;
stop) stop ;;
*)
    echo "usage: $0 start|stop" >&2
    exit 2
    ;;
esac
