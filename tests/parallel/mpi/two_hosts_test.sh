#!/usr/bin/env bash
# MPI between two hosts, emulated by two network namespaces with different host names, connected by a pair of virtual
# Ethernet devices: mpirun starts its remote half through `ip netns exec` instead of ssh, and MPI uses TCP.
#   two_hosts_test.sh PROGRAM TESSERA
# TESSERA trains a pipeline with stages on different hosts, under MPI and after a TCP rendezvous, bitwise identical to the
# same plan on thread ranks. Exits with 77 (skipped) and the reason if the setup is impossible.
set -euo pipefail
program=$1 tessera=$2
export OMP_NUM_THREADS=1

skip() { echo "skipped: $*"; exit 77; }

command -v ip >/dev/null || skip "no ip command (iproute2)"
((EUID == 0)) || skip "network namespaces need root"
mpirun --version 2>&1 | grep -qiE 'open(rte| mpi)' || skip "this test requires Open MPI"

a=tessera-a-$$ b=tessera-b-$$
work=$(mktemp -d)
cleanup() {
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

{ ip netns add "$a" && ip netns add "$b" &&
  ip link add name "ta$$" netns "$a" type veth peer name "tb$$" netns "$b"; } 2>"$work/why" ||
  skip "network namespaces are not allowed: $(head -n 1 "$work/why")"
for side in "$a ta$$ 1" "$b tb$$ 2"; do
  read -r name device number <<<"$side"
  ip -n "$name" addr add "10.213.7.$number/24" dev "$device"
  ip -n "$name" link set "$device" up
  ip -n "$name" link set lo up
done

# on HOST COMMAND...: runs in the namespace, with the host's name
cat >"$work/on" <<SCRIPT
#!/usr/bin/env bash
case \$1 in 10.213.7.1) name=$a ;; *) name=$b ;; esac
shift
exec ip netns exec "\$name" unshare --uts bash -c 'hostname "\$0"; eval "\$@"' "\$name" "\$@"
SCRIPT
chmod +x "$work/on"
"$work/on" 10.213.7.1 true 2>"$work/why" || skip "cannot change the host name: $(head -n 1 "$work/why")"

over_hosts() {  # over_hosts RANKS_EACH COMMAND...
  local each=$1
  shift
  timeout -k 5 120 "$work/on" 10.213.7.1 mpirun --allow-run-as-root --oversubscribe --bind-to none \
    --mca plm_rsh_agent "$work/on" --mca btl tcp,vader,self --mca oob_tcp_if_include 10.213.7.0/24 \
    --mca btl_tcp_if_include 10.213.7.0/24 --host "10.213.7.1:$each,10.213.7.2:$each" -n $((2 * each)) "$@"
}

over_hosts 2 "$program" hosts 2
echo "2 hosts: all operations are correct"

# A pipeline of two stages with two data ranks each: pp is the outermost axis, so each host has one stage, activations and
# their gradients are sent between the hosts, and data reductions stay within one.
seq -f 'Line %g of a text that says little.' 900 >"$work/text.txt"
export TESSERA_CACHE=$work/cache
plan=(--pp 2 --dp 2 --microbatches 2 --layers 2 --heads 2 --channels 16 --context 16 --batch 8 --threads-per-rank 1)
for schedule in 1f1b zb-h1; do
  run=("$tessera" train --data "$work/text.txt" "${plan[@]}" --schedule "$schedule" --steps 8 --warmup 2 --lr 0.03
    --dropout 0.1 --eval-every 0 --quiet)
  "${run[@]}" --out "$work/threads-$schedule" >"$work/output" 2>&1 || { cat "$work/output"; exit 1; }
  over_hosts 2 "${run[@]}" --out "$work/hosts-$schedule" >"$work/output" 2>&1 || { cat "$work/output"; exit 1; }
  for file in model optimizer; do
    cmp "$work"/{threads,hosts}-"$schedule/checkpoints/step-8/$file.safetensors"
  done
  echo "2 hosts: a $schedule pipeline matches thread ranks bitwise"
done
over_hosts 2 "$tessera" verify "${plan[@]}" --steps 5 >"$work/output" 2>&1 || { cat "$work/output"; exit 1; }
grep -q 'on 4 MPI ranks (pp 2 x dp 2)' "$work/output" || { cat "$work/output"; exit 1; }
echo "2 hosts: tessera verify passes for the pipeline"

# The same without MPI: each rank is started separately, with a rendezvous on the first host.
ranks=()
for rank in 0 1 2 3; do
  "$work/on" "10.213.7.$((rank / 2 + 1))" timeout -k 5 120 "$tessera" train --data "$work/text.txt" "${plan[@]}" --schedule 1f1b \
    --steps 8 --warmup 2 --lr 0.03 --dropout 0.1 --eval-every 0 --quiet --out "$work/met" --rendezvous 10.213.7.1:29500 \
    --ranks 4 --rank "$rank" >"$work/output-$rank" 2>&1 &
  ranks+=($!)
done
for rank in "${ranks[@]}"; do wait "$rank" || { cat "$work"/output-*; exit 1; }; done
for file in model optimizer; do cmp "$work"/{threads-1f1b,met}"/checkpoints/step-8/$file.safetensors"; done
echo "2 hosts: ranks over TCP match thread ranks bitwise"

failed=0
fault() {  # fault RANKS_EACH SCENARIO LINE
  local start=$SECONDS
  over_hosts "$1" "$program" "$2" >"$work/output" 2>&1 && failed=1
  if ! grep -aqE "^tessera: \[rank [0-9]\] $3" "$work/output" || ((SECONDS - start > 15)); then
    echo "FAILED: $2 with $1 rank(s) per host; expected: $3"
    cat "$work/output"
    failed=1
  else
    echo "ok: $2 with $1 rank(s) per host after $((SECONDS - start)) s"
  fi
}
all='world axis, all_reduce of 400 bytes \(float32\): recv of [0-9]+ bytes: '
fault 1 throw 'the cause$'
fault 1 stop "${all}rank 1 sent nothing within 2 s$"
fault 1 kill "(${all}|while this rank computed: )the launcher is terminating the job \(SIGTERM\); a rank on another host may have died$"
fault 2 kill "${all}rank 1 has failed"
exit $failed
