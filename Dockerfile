# MA-RLHF in a container.
#
#   COMMIT=$(git describe --always --dirty --abbrev=40 --exclude='*')
#   CPU:   docker build -t ma-rlhf --build-arg COMMIT="$COMMIT" .
#   CUDA:  docker build -t ma-rlhf:cuda --build-arg COMMIT="$COMMIT" --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .
#
# requirements.txt says which torch is installed, TORCH_INDEX from which package index (one with builds for CPUs saves
# gigabytes where there is no GPU); without it from pip's own. COMMIT is recorded in the run.json of each run.
#
#   docker run --gpus all --user "$(id -u):$(id -g)" --shm-size 16g -v ma-rlhf-cache:/cache -v "$PWD:/work" \
#       ma-rlhf:cuda dschat ppo --config tldr_gemma_2b
#
# Several machines also need --network host, and with InfiniBand --device /dev/infiniband --ulimit memlock=-1. The volume
# ma-rlhf-cache keeps models of the Hugging Face hub, compiled code and tokenised data.
#
# The base must bring Python 3.11 or newer, or apt must have it. Programs (--reward_source programs) need
# --security-opt seccomp=unconfined, see docs/programs.md.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG TORCH_INDEX=""
ARG COMMIT=""

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
# The compiler builds DeepSpeed's CPU Adam (--offload) on first use; ssh, pdsh and procps are for several machines, the
# libraries of ibverbs for NCCL over InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential bubblewrap git ibverbs-providers libibverbs1 openssh-client pdsh \
        procps \
    && if ! command -v python3 > /dev/null; then \
        apt-get install --yes --no-install-recommends python3 python3-dev python3-venv; fi \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

WORKDIR /opt/ma-rlhf
# The pinned packages first: they are a layer that changes with requirements.txt alone.
COPY requirements.txt ./
RUN grep '^torch==' requirements.txt | python -m pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} --requirement /dev/stdin \
    && python -m pip install --requirement requirements.txt
COPY . .
# Users of the image cannot write byte code.
RUN python -m pip install --no-deps --editable . && python -m compileall -q applications Constituent-Treelib

# Hugging Face, torch, Triton and dschat keep their caches in the home folder. It belongs to everybody, so that the image
# runs as the user who owns the mounted folders. pdsh needs a user with a name.
RUN (getent passwd 1000 || useradd --uid 1000 ma-rlhf) && install --directory --mode 1777 /cache /work
ENV HOME=/cache USER=ma-rlhf MA_RLHF_COMMIT=${COMMIT}
VOLUME /cache
USER 1000
WORKDIR /work
CMD ["dschat", "--help"]
