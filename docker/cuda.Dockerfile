# infinity for NVIDIA's GPUs. From the directory with pyproject.toml:
#
#   docker build -f docker/cuda.Dockerfile -t infinity:cuda .
#   docker run --gpus all infinity:cuda
#
# torch brings CUDA; the driver is the host's, through NVIDIA's container toolkit. TORCH and TORCH_INDEX choose another
# build of torch: `--build-arg TORCH_INDEX=` and the address that pytorch.org names for a version of CUDA.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ liburing-dev pkg-config \
    && rm -rf /var/lib/apt/lists/*
COPY CMakeLists.txt pyproject.toml README.md LICENSE /source/
COPY csrc /source/csrc
COPY infinity /source/infinity
COPY configs /source/configs
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
# Triton compiles a few lines of C when a kernel is first launched.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH=torch
ARG TORCH_INDEX=
RUN python -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(echo /wheels/*.whl)[train]" && rm -r /wheels
COPY configs /opt/infinity/configs
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
RUN infinity env
CMD ["infinity", "env"]
