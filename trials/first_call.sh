#!/usr/bin/env bash
# One call on a machine with one or two GPUs: smoke, the whole GPU suite, random configurations, tables, in about 560 s.
#   LIBS: folder with libfastmax.so (main's) and, where there are, libfastmax-NAME.so of variants; OUT: what is kept.
# Every part has a time limit and its log; $OUT/out.tgz is packed every 15 s, so that a call that is cut off loses nothing.
set -u
cd "$(dirname "$0")/.."
PY=${PY:-python3} OUT=${OUT:?} LIBS=${LIBS:?}
export PYTHONPATH=$PWD
mkdir -p /tmp/o
( while sleep 15; do tar czf /tmp/o2.tgz -C /tmp o && mv /tmp/o2.tgz "$OUT/out.tgz"; done ) &
PACK=$!
say() { echo "[$SECONDS s] $*" | tee -a /tmp/o/order.log; }
part() { local name=$1 limit=$2; shift 2; timeout -k 5 "$limit" "$@" > "/tmp/o/$name.log" 2>&1; say "$name: rc $?"; }
gpus=$($PY -c "import torch; print(torch.cuda.device_count())")
say "$gpus GPUs"
if [ -e "$LIBS/libfastmax-p1.so" ]; then  # linear1_sm90_covers says yes to gradients
    cp "$LIBS/libfastmax-p1.so" fastmax/libfastmax.so
    part p1_where 90 $PY trials/p1_where.py 40 23
    part p1_race 45 $PY trials/p1_race.py 0.4
fi
cp "$LIBS/libfastmax.so" fastmax/
part smoke 60 $PY -m fastmax.verify --only "linear"
suite() {
    PYTEST_ADDOPTS="-p no:benchmark -p no:cacheprovider" CUDA_VISIBLE_DEVICES=$1 part suite 400 \
        $PY -m pytest -q -m cuda -n 23 --dist worksteal --timeout 300 tests
}
tables() {
    [ "$gpus" -gt 1 ] && part dist 90 $PY -m pytest -q -p no:benchmark -m cuda tests/test_distributed_cuda.py
    part random 150 $PY -m fastmax.verify --hopper --random 2000 --seed 3 --processes 8
    for table in cuda flash options; do
        part "bench_$table" 60 $PY -m benchmarks.run $table --seconds 0.2 --out /tmp/o/$table.csv
    done
}
if [ "$gpus" -gt 1 ]; then
    part bench_distributed 60 $PY -m benchmarks.distributed --out /tmp/o/distributed.csv
    suite 1,0 &
    SUITE=$!
    tables
    wait $SUITE
else
    suite 0
    tables
fi
kill $PACK
tar czf "$OUT/out.tgz" -C /tmp o
tail -5 /tmp/o/suite.log
cat /tmp/o/order.log
