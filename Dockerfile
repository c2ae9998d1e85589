# Etude on a CPU:
#   docker build -t etude .
#   mkdir -p runs
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/workspace/runs" etude train reach
# The first stage builds the wheel, so that the image holds no checkout.
FROM python:3.13-slim AS build
WORKDIR /source
RUN pip install --no-cache-dir build
COPY pyproject.toml README.md LICENSE MANIFEST.in CHANGELOG.md CITATION.cff SECURITY.md ./
COPY src src
RUN python -m build --outdir /dist

FROM python:3.13-slim
# Films are drawn without a screen.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libegl1 libgl1-mesa-dri libgles2 \
    && rm -rf /var/lib/apt/lists/*
# torch for the CPU first: it satisfies the wheel's bound, and CUDA's libraries stay away. The versions
# are those that the tests ran with; hashes are left out, since pip would demand one of the wheel too.
COPY requirements-dev.txt /tmp/
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
        "$(grep -o '^torch==[^ ]*' /tmp/requirements-dev.txt)" \
    && grep -o '^[a-z0-9][^\\]*' /tmp/requirements-dev.txt > /tmp/versions.txt \
    && pip install --no-cache-dir -c /tmp/versions.txt "$(ls /dist/*.whl)[video]"
# Nothing needs root: whoever starts it writes to /workspace, most of all to runs/, which is mounted there.
RUN mkdir -m 777 /workspace
ENV HOME=/tmp MUJOCO_GL=egl
USER nobody
WORKDIR /workspace
ENTRYPOINT ["etude"]
CMD ["--help"]
