#!/usr/bin/env bash
# A cluster of one node: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd, kubelet, and DNS for
# headless Services. Run it as process 1 of namespaces of its own (see cluster.py): all of it ends with this script.
#   control_plane.sh PROGRAMS STATE IMAGES
# PROGRAMS is the folder that tests/setup/kubernetes.sh prints, STATE a new folder, IMAGES what containerd keeps for the
# next time. When the node is Ready, STATE/ready is there; STATE/log has what each program says.
set -euo pipefail
programs=$1 state=$2 images=$3
here=$(cd "$(dirname "$0")" && pwd)
PATH=$programs:$PATH:/usr/sbin:/sbin
address=10.244.0.1 # of the node: the bridge of the pods
services=10.96.0.0/16
api=127.0.0.1:6443
mkdir -p "$state"/{pki,log,pid,kubelet,cni,run}
cd "$state"

start() { # NAME COMMAND...
    local name=$1
    shift
    "$@" </dev/null >"log/$name" 2>&1 &
    echo $! >"pid/$name"
}
until_ok() { # COMMAND...: pytest ends us when this takes too long
    until "$@" >/dev/null 2>&1; do
        for each in pid/*; do
            kill -0 "$(cat "$each")" || { echo "${each#pid/} has ended: $(tail -3 "log/${each#pid/}")" >&2; exit 1; }
        done
        sleep 0.2
    done
}

# Here a mount is seen by all, as on a node; nobody outside sees it.
mount --make-rshared /
ip link set lo up
# With a MAC of its own the bridge does not take that of each pod that comes: pods would lose DNS for seconds.
ip link add pods0 address 02:00:0a:f4:00:01 type bridge
ip address add "$address/16" dev pods0
ip link set pods0 up
echo 1 >/proc/sys/net/ipv4/ip_forward
cat >cni/pods.conflist <<END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true,
 "hairpinMode": true, "ipam": {"type": "host-local", "dataDir": "$state/run/addresses",
 "ranges": [[{"subnet": "10.244.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END

# Root of a container or a virtual machine of CI may not lower oom_score_adj: containerd and kubelet do not try.
cat >containerd.toml <<END
version = 2
root = "$images"
state = "$state/run/containerd"
[grpc]
  address = "$state/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/trainer-launch-test/pause:1"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$state/cni"
END
start containerd containerd --config "$state/containerd.toml"

# One authority signs the API server, and everybody else as an administrator.
openssl req -x509 -newkey rsa:2048 -nodes -days 30 -keyout pki/ca.key -out pki/ca.crt -subj /CN=tests 2>log/openssl
issue() { # NAME SUBJECT USAGE SAN
    openssl req -newkey rsa:2048 -nodes -keyout "pki/$1.key" -out "pki/$1.csr" -subj "$2"
    openssl x509 -req -in "pki/$1.csr" -CA pki/ca.crt -CAkey pki/ca.key -CAcreateserial -days 30 -out "pki/$1.crt" \
        -extfile <(printf 'extendedKeyUsage=%s\nsubjectAltName=%s\n' "$3" "$4")
}
issue apiserver /CN=kube-apiserver serverAuth "IP:127.0.0.1,IP:$address,IP:${services%0/16}1" 2>>log/openssl
issue admin /O=system:masters/CN=admin clientAuth DNS:admin 2>>log/openssl
openssl genrsa -out pki/accounts.key 2048 2>>log/openssl
cat >kubeconfig <<END
apiVersion: v1
kind: Config
clusters: [{name: it, cluster: {server: "https://$api", certificate-authority: $state/pki/ca.crt}}]
users: [{name: admin, user: {client-certificate: $state/pki/admin.crt, client-key: $state/pki/admin.key}}]
contexts: [{name: it, context: {cluster: it, user: admin}}]
current-context: it
END

start etcd etcd --data-dir "$state/etcd" --unsafe-no-fsync --log-level warn
start apiserver kube-apiserver --bind-address=127.0.0.1 --advertise-address="$address" --secure-port="${api#*:}" \
    --etcd-servers=http://127.0.0.1:2379 --service-cluster-ip-range="$services" --endpoint-reconciler-type=none \
    --authorization-mode=RBAC --client-ca-file=pki/ca.crt --tls-cert-file=pki/apiserver.crt \
    --tls-private-key-file=pki/apiserver.key --kubelet-client-certificate=pki/admin.crt \
    --kubelet-client-key=pki/admin.key --kubelet-preferred-address-types=InternalIP --cert-dir=pki \
    --service-account-key-file=pki/accounts.key --service-account-signing-key-file=pki/accounts.key \
    --service-account-issuer=https://kubernetes.default.svc
ask() { kubectl --kubeconfig kubeconfig "$@"; }
until_ok ask get --raw /readyz
common=(--kubeconfig=kubeconfig --bind-address=127.0.0.1 --leader-elect=false --port=0 --cert-dir=pki)
start controller-manager kube-controller-manager "${common[@]}" --service-account-private-key-file=pki/accounts.key \
    --root-ca-file=pki/ca.crt
start scheduler kube-scheduler "${common[@]}"
start dns python3 "$here/dns.py" "$address" "$api" "$state"

# The cgroups of its pods have a parent of their own, whatever else runs on this machine.
echo "nameserver 127.0.0.1" >resolv.conf
cat >kubelet.yaml <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $address
readOnlyPort: 0
cgroupDriver: cgroupfs
cgroupRoot: /trainer-launch-kubelet
failSwapOn: false
oomScoreAdj: 0
clusterDomain: cluster.local
clusterDNS: [$address]
resolvConf: $state/resolv.conf
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: $state/pki/ca.crt}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
imageGCHighThresholdPercent: 100
volumeStatsAggPeriod: 5s
nodeStatusUpdateFrequency: 5s
serializeImagePulls: false
volumePluginDir: $state/kubelet/plugins
END
for hierarchy in /sys/fs/cgroup/*/; do
    mkdir -p "$hierarchy/trainer-launch-kubelet" 2>/dev/null || true
done
start kubelet kubelet --container-runtime=remote --container-runtime-endpoint="unix://$state/run/containerd.sock" \
    --root-dir="$state/kubelet" --cert-dir="$state/pki" --config=kubelet.yaml --hostname-override=node --node-ip="$address" \
    --kubeconfig=kubeconfig
until_ok ask wait --for=condition=Ready node/node --timeout=1s
until_ok ask get serviceaccount default
touch ready
while true; do wait -n || true; sleep 1; done # what pods leave behind is this process's to reap
