# syntax=docker/dockerfile:1
# The service's image, for a CPU (--target cpu) or a GPU (--target cuda, the default).
#
#   docker build --target cuda -t drafter-service:0.1.0-cuda .
#
# For a reproducible base give its digest: --build-arg BASE_DIGEST=@sha256:...
# Where the CPU image may be small, give the index of PyTorch's CPU builds: --build-arg TORCH_INDEX=--index-url=...
ARG BASE_DIGEST=""

FROM python:3.12.12-slim-bookworm${BASE_DIGEST} AS build
WORKDIR /source
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/specdraft
ENV PATH=/opt/specdraft/bin:$PATH
COPY constraints.txt ./
# By itself: the largest layer changes only with its version.
ARG TORCH_INDEX=""
RUN pip install -c constraints.txt ${TORCH_INDEX:+"${TORCH_INDEX}"} torch
COPY LICENSE README.md pyproject.toml ./
COPY clients/python clients/python
COPY drafter_service drafter_service
COPY kernels kernels
# One layer with both distributions: the client comes from here and from no index.
RUN pip install -c constraints.txt ./clients/python '.[tracing]'

FROM build AS build-cuda
RUN pip install -c constraints.txt cuda-bindings triton

FROM python:3.12.12-slim-bookworm${BASE_DIGEST} AS base
# tini is process 1: the service gets signals, and a pid of its own. Equal pids (1 and 1) break CUDA IPC.
# Debian keeps the newest version of a package alone: the base's digest decides, not a number here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 specdraft \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/specdraft specdraft \
    && install -d -o 10001 -g 10001 -m 0750 /run/specdraft /var/cache/specdraft
# What is written at run time: sockets, compiled kernels, scratch. The rest of the root file system may be read-only.
ENV PATH=/opt/specdraft/bin:$PATH \
    HOME=/var/cache/specdraft \
    TRITON_CACHE_DIR=/var/cache/specdraft/triton \
    XDG_CACHE_HOME=/var/cache/specdraft \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
VOLUME ["/run/specdraft", "/var/cache/specdraft", "/tmp"]
EXPOSE 9464 9465
USER 10001:10001
ENTRYPOINT ["tini", "--", "drafter-service"]
CMD ["serve"]
HEALTHCHECK --start-period=600s --interval=30s --timeout=10s --retries=3 CMD ["drafter-service", "health"]

FROM base AS cpu
COPY --from=build /opt/specdraft /opt/specdraft

FROM base AS cuda
USER 0:0
# Triton compiles a small C module for each kernel.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/specdraft /opt/specdraft
