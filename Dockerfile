# MA-RLHF in a container.
#
#   CPU:   docker build -t ma-rlhf .
#   CUDA:  docker build -t ma-rlhf:cuda --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .
#
# TORCH_INDEX names a package index that has the wanted build of torch, where yours gives another one.
#
#   docker run --gpus all --shm-size 16g -v "$PWD:/work" ma-rlhf:cuda dschat ppo --config tldr_gemma_2b
#
# The base must bring Python 3.11 or newer, or apt must have it. Programs (--reward_source programs) need
# --security-opt seccomp=unconfined, see docs/programs.md.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG TORCH_INDEX=""

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
# The compiler builds DeepSpeed's CPU Adam (--offload) on first use; ssh, pdsh and procps are for several machines.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential bubblewrap git openssh-client pdsh procps \
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
RUN python -m pip install --no-deps --editable .

WORKDIR /work
CMD ["dschat", "--help"]
