# torch_cgx in a container; docs/install.md tells more:
#
#   docker build --tag torch-cgx .
#   docker run --rm --shm-size=1g torch-cgx
#
# --shm-size: ranks of one host talk through /dev/shm, of which Docker gives 64 MB where nothing is said.

FROM python:3.12-slim AS build
# The newest of the base's release will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY src src
# An index of one's own, for pip here and below: --build-arg PIP_INDEX_URL=...
ARG PIP_INDEX_URL
# pip goes on without a compiler; a container that is to be fast must not.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && ls /wheels/*linux*.whl

FROM python:3.12-slim
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH="torch>=2.6"
ARG EXTRAS=plot
COPY --from=build /wheels /wheels
# The versions are those that the arguments ask for.
# hadolint ignore=DL3013
RUN wheel=$(ls /wheels/*.whl) \
    && pip install --no-cache-dir "$TORCH" "${wheel}[$EXTRAS]" \
    && useradd --create-home --uid 1000 cgx
USER 1000
WORKDIR /work
CMD ["cgx", "doctor"]
