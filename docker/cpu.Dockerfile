# infinity for machines without a GPU. From the directory with pyproject.toml:
#
#   docker build -f docker/cpu.Dockerfile -t infinity:cpu .
#
# torch comes from pip's own index, with the libraries of CUDA that nothing here uses. With
# `--build-arg TORCH_INDEX=` and the address of the CPU builds (pytorch.org names it) the image is a third as large.
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
ARG TORCH=torch
ARG TORCH_INDEX=
RUN python -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(echo /wheels/*.whl)[train]" && rm -r /wheels
COPY configs /opt/infinity/configs
WORKDIR /work
RUN infinity env
CMD ["infinity", "env"]
