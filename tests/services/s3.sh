#!/usr/bin/env bash
# A real S3 server for tests: one Ceph monitor, one storage daemon in memory, one radosgw, all on a loopback address.
#
#   s3.sh DIRECTORY ADDRESS        e.g. s3.sh /tmp/x 127.20.30.40
#
# DIRECTORY is new and is deleted at the end. When requests are served, lines NAME=VALUE and then "ready" come out. It
# serves until its standard input ends, which happens however its parent ends, and kills the daemons, which die with it
# in any case. Other addresses of 127.0.0.0/8 have servers of their own with the same ports.
set -euo pipefail

directory=$1 address=$2
port=7480
access_key=CKSTORETESTS00000001 secret_key=secret-of-the-tests-of-ckstore-0000000001
conf=$directory/ceph.conf
daemons=()

finish() {
    trap - EXIT
    # Nothing is kept, so nothing need be flushed; asked to end, the storage daemon would take seconds.
    for pid in "${daemons[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$directory"
}

begin() { # a daemon in the foreground of a job, which the kernel kills should this script be killed
    setpriv --pdeathsig KILL "$@" -f -c "$conf" >>"$directory/log/daemons" 2>&1 </dev/null &
    daemons+=("$!")
}

served() { curl -fsS -m 2 -o /dev/null "http://$address:$port/" 2>/dev/null; }

fail() {
    echo "s3.sh: $1; the last lines of its logs:" >&2
    tail -n 8 "$directory"/log/* >&2 || true
    exit 1
}

configure() {
    mkdir -p "$directory"/{run,log,mon,osd,rgw,crash}
    cat >"$conf" <<END
[global]
fsid = $1
mon_initial_members = a
mon_host = [v2:$address:3300,v1:$address:6789]
public_addr = $address
cluster_addr = $address
ms_bind_ipv6 = false
ms_bind_port_min = 6800
ms_bind_port_max = 6850
# Nobody else reaches this address: no keys. A secure mode, which radosgw would ask for, cannot do without.
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_cluster_mode = crc
ms_service_mode = crc
ms_client_mode = crc
ms_mon_cluster_mode = crc
ms_mon_service_mode = crc
ms_mon_client_mode = crc
run_dir = $directory/run
admin_socket = $directory/run/\$name.asok
pid_file = $directory/run/\$name.pid
log_file = $directory/log/\$name
mon_cluster_log_file = $directory/log/cluster
crash_dir = $directory/crash
log_to_stderr = false
# One copy, in one place, of few parts.
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_num = 2
osd_pool_default_pgp_num = 2
osd_pool_default_pg_autoscale_mode = off
mon_max_pg_per_osd = 1000
[mon]
mon_data = $directory/mon
# It may start on a disk that is nearly full.
mon_data_avail_crit = 1
mon_data_avail_warn = 2
# Each pool is a proposal, and each waits for this long.
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
[osd]
osd_data = $directory/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_class_load_list = *
osd_class_default_list = *
[client.rgw]
rgw_data = $directory/rgw
rgw_frontends = beast endpoint=$address:$port tcp_nodelay=1
rgw_thread_pool_size = 32
rgw_dynamic_resharding = false
END
}

start() {
    local storage
    storage=$(cat /proc/sys/kernel/random/uuid)
    configure "$(cat /proc/sys/kernel/random/uuid)"
    {
        monmaptool --create --clobber --fsid "$(sed -n 's/^fsid = //p' "$conf")" \
            --addv a "[v2:$address:3300,v1:$address:6789]" "$directory/monmap"
        ceph-mon --mkfs -i a --monmap "$directory/monmap" -c "$conf"
    } >>"$directory/log/start" 2>&1 || fail "no monitor could be made"
    begin ceph-mon -i a
    timeout 60 ceph -c "$conf" --connect-timeout 50 osd new "$storage" >>"$directory/log/start" 2>&1 ||
        fail "the monitor does not answer"
    ceph-osd -i 0 --mkfs --osd-uuid "$storage" -c "$conf" >>"$directory/log/start" 2>&1 || fail "no storage could be made"
    begin ceph-osd -i 0
    timeout 100 radosgw-admin -c "$conf" -n client.rgw user create --uid tests --display-name tests \
        --access-key "$access_key" --secret-key "$secret_key" >>"$directory/log/start" 2>&1 || fail "no user could be made"
    begin radosgw -n client.rgw
    for _ in $(seq 300); do
        served && return
        sleep 0.1
    done
    fail "radosgw does not answer"
}

trap finish EXIT
trap 'exit 1' TERM INT HUP
mkdir -p "$directory"
start
echo "AWS_ACCESS_KEY_ID=$access_key"
echo "AWS_SECRET_ACCESS_KEY=$secret_key"
echo "ENDPOINT=http://$address:$port"
echo "RADOSGW=${daemons[2]}"
echo ready
cat >/dev/null
