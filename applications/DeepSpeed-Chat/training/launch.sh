# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the training scripts share: a script sources this file, asks for its batch flags and launches.
#
# Environment, the same for every script:
#   PROJ_PATH     folder for data and models (default: the current folder)
#   MODEL         model to start from: in step 1 a base model, in steps 2 and 3 what step 1 wrote; with another one, or
#                 other DATA, the default output folder has another name
#   REWARD_MODEL  step 3: what step 2 wrote
#   DATA          data file, folder, or name of a data set
#   MA_RLHF_DATA  folder with local copies of named data sets, which come first (default: $PROJ_PATH/data)
#   NUM_GPUS      processes on each machine (default: the GPUs of CUDA_VISIBLE_DEVICES or nvidia-smi, or 1)
#   MASTER_PORT   port of the launcher, for several runs on one machine (default: 29500)
# Several machines, either with ssh between them:
#   HOSTFILE      DeepSpeed's list of machines, lines of "name slots=8"; started on one of them
# or without, started on each of them:
#   NUM_NODES     number of machines
#   NODE_RANK     which one this is, from 0
#   MASTER_ADDR   address of the first
set -euo pipefail

PROJ_PATH=${PROJ_PATH:-$PWD}
export MA_RLHF_DATA=${MA_RLHF_DATA:-$PROJ_PATH/data}
MAIN=$(cd -- "$(dirname -- "${BASH_SOURCE[1]}")/.." >/dev/null && pwd)/main.py

# What ended a run is repeated last, below the launcher's own lines.
SCRATCH=$(mktemp -d)
export MA_RLHF_ERROR_FILE=$SCRATCH/error
touch "$MA_RLHF_ERROR_FILE"
trap 'cat "$MA_RLHF_ERROR_FILE" >&2; rm -rf "$SCRATCH"' EXIT

fail() {
    echo "error: $*" >&2
    exit 2
}

# is_count WORD: whether it is a whole number of at least 1.
is_count() {
    [[ $1 =~ ^[1-9][0-9]*$ ]]
}

# Sets NUM_PROCESSES and LAUNCHER, the launcher's own flags.
choose_processes() {
    LAUNCHER=(--master_port "${MASTER_PORT:-29500}")
    if [[ -n ${NUM_GPUS:-} ]] && ! is_count "$NUM_GPUS"; then
        fail "NUM_GPUS=$NUM_GPUS: give a whole number of at least 1."
    fi
    read_visible_gpus
    if [[ -n ${HOSTFILE:-} || -n ${NODE_RANK:-} || ${NUM_NODES:-1} != 1 ]]; then
        use_machines
    elif ((${#VISIBLE[@]})); then
        use_visible_gpus
    else
        NUM_PROCESSES=${NUM_GPUS:-$(count_gpus)}
        LAUNCHER=(--num_gpus "$NUM_PROCESSES" "${LAUNCHER[@]}")
    fi
}

# Sets VISIBLE, the numbers in CUDA_VISIBLE_DEVICES. Of anything else the launcher would only keep the count, and use
# that many GPUs from 0 on, which may be somebody else's.
read_visible_gpus() {
    local number='[[:space:]]*[0-9]+[[:space:]]*' given=${CUDA_VISIBLE_DEVICES:-}
    if [[ -n ${given//[[:space:]]/} && ! $given =~ ^$number(,$number)*$ ]]; then
        fail "CUDA_VISIBLE_DEVICES=$given: the launcher takes GPUs by number alone; give the numbers that" \
            "\`nvidia-smi --list-gpus\` shows, such as CUDA_VISIBLE_DEVICES=0,1."
    fi
    IFS=, read -r -a VISIBLE <<<"${given//[[:space:]]/}"
}

# GPUs of this machine that may be used; 1 without any, or where an empty CUDA_VISIBLE_DEVICES hides them.
count_gpus() {
    local found=${#VISIBLE[@]}
    if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]] && command -v nvidia-smi >/dev/null; then
        found=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || true
    fi
    is_count "$found" && echo "$found" || echo 1
}

# The launcher replaces CUDA_VISIBLE_DEVICES, so it has to be told.
use_visible_gpus() {
    NUM_PROCESSES=${NUM_GPUS:-${#VISIBLE[@]}}
    ((NUM_PROCESSES <= ${#VISIBLE[@]})) ||
        fail "NUM_GPUS=$NUM_PROCESSES, but CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES names fewer: change one of them."
    LAUNCHER=(--include "localhost:$(IFS=, && echo "${VISIBLE[*]:0:NUM_PROCESSES}")" "${LAUNCHER[@]}")
}

use_machines() {
    local given=${DS_ENV_FILE:-.deepspeed_env} place
    for place in "${!VISIBLE[@]}"; do
        [[ ${VISIBLE[place]} == "$place" ]] ||
            fail "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES: on several machines the launcher uses the GPUs from 0" \
                "on; unset the variable and give the first NUM_GPUS of each to this run."
    done
    if [[ -z ${HOSTFILE:-} ]]; then
        write_hostfile
    elif [[ ! -f $HOSTFILE ]]; then
        fail "HOSTFILE=$HOSTFILE: there is no such file."
    fi
    count_slots
    LAUNCHER=(--hostfile "$HOSTFILE" ${NUM_GPUS:+--num_gpus "$NUM_GPUS"} "${LAUNCHER[@]}")
    if [[ -n ${NODE_RANK:-} ]]; then
        [[ -n ${MASTER_ADDR:-} ]] || fail "MASTER_ADDR is not set: give the address of the first machine."
        LAUNCHER+=(--no_ssh --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR")
        return
    fi
    # The launcher passes few variables on to other machines: those of this file, and NCCL's.
    {
        cat ~/"$given" ./"$given" "$given" 2>/dev/null || true
        echo "MA_RLHF_DATA=$MA_RLHF_DATA"
    } >"$SCRATCH/variables"
    export DS_ENV_FILE=$SCRATCH/variables
}

# The launcher wants a list of the machines' names and sizes; with --no_ssh it starts only this one's processes.
write_hostfile() {
    is_count "${NUM_NODES:-}" || fail "NUM_NODES=${NUM_NODES:-}: give the number of machines, or HOSTFILE."
    [[ -n ${NODE_RANK:-} ]] || fail "NODE_RANK is not set: give 0 on the first machine, 1 on the second, and so on."
    local node slots=${NUM_GPUS:-$(count_gpus)}
    HOSTFILE=$SCRATCH/hostfile
    for ((node = 0; node < NUM_NODES; node++)); do
        echo "node-$node slots=$slots" >>"$HOSTFILE"
    done
}

# Sets NUM_PROCESSES from HOSTFILE; NUM_GPUS, if set, replaces its numbers of slots.
count_slots() {
    local name slots
    NUM_PROCESSES=0
    while read -r name slots _ || [[ -n $name ]]; do
        if [[ -n $name && $name != \#* ]]; then
            slots=${slots#slots=}
            is_count "$slots" || fail "HOSTFILE=$HOSTFILE: the line of $name must be like \"$name slots=8\"."
            NUM_PROCESSES=$((NUM_PROCESSES + ${NUM_GPUS:-slots}))
        fi
    done <"$HOSTFILE"
    ((NUM_PROCESSES > 0)) || fail "HOSTFILE=$HOSTFILE names no machine: give lines like \"name slots=8\"."
}

# choose_run NAME MODEL DATA: sets MODEL and DATA, where they are not given, and RUN, the folder of the run's steps. NAME
# is the published run's, DATA-MODEL: another model or data set takes its place there. MODEL `sft` is what step 1 of the
# same run wrote. A script that changes a preset of step 3 gives its own folder a suffix, MA_RLHF_VARIANT.
choose_run() {
    local data=${1%%-*} model=${1#*-}
    [[ ${DATA:-$3} == "$3" ]] || data=$(short_name "$DATA")
    if [[ ${MODEL:-$2} != "$2" ]]; then
        model=$(short_name "$MODEL")
        model=${model#"$data"-}
    fi
    RUN=$PROJ_PATH/models/${data:+$data-}$model
    if [[ -d $PROJ_PATH/models/$1 && ! -d $RUN ]]; then
        echo "note: this run is written below $RUN; earlier versions wrote every one below $PROJ_PATH/models/$1" >&2
    fi
    DATA=${DATA:-$3}
    [[ $2 != sft ]] || MODEL=${MODEL:-$RUN/sft}
    MODEL=${MODEL:-$2}
}

# short_name PATH: its last part, without the suffix of a data file; where that says little, the one before, too.
short_name() {
    local path=${1%/} name
    path=${path%/sft}
    path=${path%.gz}
    name=${path##*/}
    name=${name%.jsonl} name=${name%.json} name=${name%.csv} name=${name%.parquet}
    case $name in
        actor* | ppo* | dpo | refuel* | train* | pairs | models | step-*) [[ $path != */* ]] || name=$(short_name "${path%/*}")-$name ;;
    esac
    echo "${name//[^[:alnum:]._-]/-}"
}

# batch_flags PRESET… -- FLAGS…: sets BATCH, the batch flags for this number of processes. PRESET is the global batch
# and, per process, the most examples that fit into a GPU's memory; FLAGS are those given to the script.
# shellcheck disable=SC2034  # the scripts use it
batch_flags() {
    local words
    words=$(python -m dschat.config.preset_batches --processes "$NUM_PROCESSES" "$@") || exit
    read -r -a BATCH <<<"$words"
}

# launch FLAGS…: the step's main.py with these flags on every GPU. The script waits for all processes, which have a
# process group of their own, and after SIGTERM or Ctrl-C ends with the signal's status.
launch() {
    local status=0 job signal_status=""
    set -m
    deepspeed "${LAUNCHER[@]}" "$MAIN" --deepspeed "$@" &
    job=$!
    set +m
    trap 'pass_on TERM 143' TERM
    trap 'pass_on INT 130' INT
    wait "$job" || status=$?
    while kill -0 -- "-$job" 2>/dev/null; do # a signal ends `wait`, not the processes
        wait "$job" || status=$?
        sleep 0.2
    done
    return "${signal_status:-$status}"
}

# pass_on SIGNAL STATUS: the first signal goes to the processes that train, which save a checkpoint however long that
# takes and end; the launcher follows them. It would kill them after 30 seconds, and does so at a second signal.
pass_on() {
    local processes=()
    [[ -n $signal_status ]] || mapfile -t processes < <(training_processes)
    signal_status=$2
    kill "-$1" -- "${processes[@]:--$job}" 2>/dev/null || true
}

# Grandchildren of the launcher, on this machine; none before they are there, or where ssh starts them.
training_processes() {
    local words=" ${LAUNCHER[*]} " child
    if [[ $words != *" --hostfile "* || $words == *" --no_ssh "* ]]; then
        for child in $(pgrep -P "$job"); do
            pgrep -P "$child"
        done
    fi
}

choose_processes
