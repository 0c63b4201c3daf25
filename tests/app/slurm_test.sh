#!/usr/bin/env bash
# The commands of docs/cluster.md under SLURM: a controller and a node for this test, both on this host, with enough
# CPUs for the tasks. GPU and multi-node commands of the page are omitted.
#   slurm_test.sh TESSERA PAGE
# Exits with 77 (skipped) and the reason if SLURM cannot be set up.
set -euo pipefail
tessera=$1 page=$2
skip() { echo "skipped: $*"; exit 77; }
fail() { echo "FAILED: $*"; tail -n 30 "$work"/*.out "$work"/*.log 2>/dev/null || true; exit 1; }
for name in slurmctld slurmd srun sbatch munged; do command -v $name >/dev/null || skip "no $name"; done
((EUID == 0)) || skip "a node that starts tasks needs root"

work=$(mktemp -d)
host=$(hostname -s)
mkdir "$work"/{state,spool,munge,bin}
chmod 755 "$work"
chmod 700 "$work/munge"
ln -s "$tessera" "$work/bin/tessera"
export PATH=$work/bin:$PATH SLURM_CONF=$work/slurm.conf OMP_NUM_THREADS=1 TESSERA_CACHE=$work/cache
# Open MPI's daemons and locks belong to one user, and a container may have no user except root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
port=$((20000 + $$ % 5000 * 2))
cat >"$SLURM_CONF" <<CONF
ClusterName=tessera
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES State=UP MaxTime=INFINITE
CONF
(umask 077 && head -c 64 /dev/urandom >"$work/munge/key")
munged --force --foreground --socket "$work/munge.socket" --key-file "$work/munge/key" --pid-file "$work/munge/pid" \
  --log-file "$work/munge.log" --seed-file "$work/munge/seed" --num-threads 1 2>/dev/null &
started=($!)
cleanup() {
  scancel --quiet --user root 2>/dev/null || true
  kill "${started[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
for _ in {1..50}; do [[ -S $work/munge.socket ]] && break; sleep 0.1; done
slurmctld -D 2>/dev/null &
started+=($!)
slurmd -D 2>/dev/null &
started+=($!)
for _ in {1..100}; do [[ $(sinfo -h -o %T 2>/dev/null) == idle ]] && break; sleep 0.2; done
[[ $(sinfo -h -o %T 2>/dev/null) == idle ]] || skip "no node comes up here: $(tail -n 1 "$work/slurmd.log" 2>/dev/null)"

seq -f 'Line %g of a text that says little.' 900 >"$work/text.txt"
small="--data $work/text.txt --dp 2 --layers 1 --heads 2 --channels 16 --context 16 --batch 4 --steps 8 --warmup 2 --lr 0.03"
small+=" --threads-per-rank 1 --eval-every 0 --quiet"
same() {  # bitwise identical to thread ranks
  for file in model optimizer; do
    cmp "$work"/{threads,"$1"}"/checkpoints/step-8/$file.safetensors" || fail "$1 has other bits than thread ranks"
  done
}
# shellcheck disable=SC2086  # a word is an option
tessera train $small --out "$work/threads" >"$work/threads.out" 2>&1 || fail "thread ranks"

# block N: the page's N-th SLURM code block, adapted to this host
block() {
  awk '/^## /{here = /^## SLURM/} here && /^```/{if (inside) inside = 0; else {inside = 1; ++n}; next} here && inside && n == '"$1" "$page" |
    sed -e '/gpus-per-node/d' -e 's/--nodes=2/--nodes=1/' -e 's/--ntasks-per-node=4/--ntasks-per-node=2/' -e 's/--ranks 8/--ranks 2/' \
      -e "s#/shared/runs#$work#" -e "s#--tp 4 --dp 2 --device cuda .*\.\.\.#$small#" -e "s#--rank \$SLURM_PROCID \.\.\.#--rank \$SLURM_PROCID $small --out $work/met#"
}

# batch ARGUMENT...: like sbatch --wait, which polls every ten seconds
batch() {
  local job state=
  job=$(sbatch --parsable "$@") || return 1
  for _ in {1..400}; do
    state=$(scontrol --oneliner show job "$job" | grep -o 'JobState=[A-Z_]*')
    [[ $state =~ PENDING|CONFIGURING|RUNNING|COMPLETING ]] || break
    sleep 0.25
  done
  [[ $state == JobState=COMPLETED ]]
}

block 1 >"$work/job.sh"
grep -q -- '--launch "srun --mpi=pmix' "$work/job.sh" || fail "the page has no such lines"
batch --output "$work/job.out" "$work/job.sh" || fail "the job of the page"
same tessera
echo "the job of docs/cluster.md is bitwise identical to thread ranks"
batch --output "$work/again.out" "$work/job.sh" || fail "the job, queued again"
same tessera
echo "the same job resumes"

# shellcheck disable=SC2086
timeout 60 srun --mpi=pmix -n 2 tessera train $small --out "$work/pmix" >"$work/pmix.out" 2>&1 || fail "srun --mpi=pmix"
same pmix
echo "srun --mpi=pmix: tasks are ranks"

# shellcheck disable=SC2086
if timeout 60 srun --mpi=none -n 2 tessera train $small --out "$work/none" >"$work/none.out" 2>&1; then fail "srun without a PMI"; fi
grep -q 'srun' "$work/none.out" || fail "srun without a PMI: the reason is not printed"
echo "srun without a PMI: rejected"

{ echo '#!/bin/bash'; block 2; } >"$work/meet.sh"
grep -q -- '--rendezvous' "$work/meet.sh" || fail "the page has no such lines"
batch --ntasks 2 --output "$work/meet.out" "$work/meet.sh" || fail "tasks that meet at an address"
same met
echo "tasks with a rendezvous are bitwise identical to thread ranks"
