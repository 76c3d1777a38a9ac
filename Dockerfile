# One file, two images:
#   light    router, cache, command line: no torch
#   worker   prefill, decode, and the one-shot that fetches a model: with torch and tcmalloc
#
# pip is steered by its own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...), given as build arguments. Versions
# are those of constraints.txt. Dependencies are layers of their own: a change of our code replaces a few hundred KB.

ARG PYTHON_IMAGE=python:3.11-slim

# --- what is used to build, and left behind ---------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS tools
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends binutils libtcmalloc-minimal4 \
 && mkdir /tcmalloc && cp /usr/lib/*/libtcmalloc_minimal.so.4 /tcmalloc
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY pyproject.toml constraints.txt ./
# Names alone, so that installing them does not depend on our code.
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
open('light.txt', 'w').write('\n'.join(p['dependencies'])); \
extras = p['optional-dependencies']; open('engine.txt', 'w').write('\n'.join(extras['engine'] + extras['nixl']))"

FROM tools AS light-venv
RUN python3 -m venv --without-pip /opt/diptych \
 && python3 -m pip --python /opt/diptych/bin/python install -q -r light.txt -c constraints.txt \
 && find /opt/diptych/lib/python3*/site-packages/numpy -name tests -type d -prune -exec rm -rf {} +

FROM tools AS worker-venv
# This venv keeps its pip: the default model is fetched with it.
# Away with torch's tests and headers, with symbols, and with the test suites of what it brings along: a third of all.
RUN python3 -m venv /opt/diptych \
 && /opt/diptych/bin/pip install -q -r light.txt -r engine.txt -c constraints.txt \
 && cd /opt/diptych/lib/python3*/site-packages \
 && rm -rf torch/test torch/include torch/share/cmake torch/lib/*.a nixl_ep_cu12 ../../../include/site/*/nixl-cu12 \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && find torch -name '*.pyi' -delete \
 && find . -regextype egrep -regex '\./(numpy|numba|sympy|networkx|mpmath)(/.*)?/tests' -type d -prune -exec rm -rf {} + \
 && find . -regextype egrep -regex '.*/(libtorch_cpu|libtorch_python|libllvmlite)\.so' -exec strip --strip-unneeded {} + \
 && /opt/diptych/bin/python -c 'import torch, nixl_cu12'

FROM tools AS code
RUN python3 -m venv /opt/diptych
COPY README.md LICENSE ./
COPY diptych diptych
COPY services services
RUN /opt/diptych/bin/pip install -q --no-deps --prefix /code . -c constraints.txt

# --- what runs --------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin diptych \
 && install -d -o diptych -g diptych /models /models/kernels
COPY deploy/image/entry.sh /usr/local/bin/diptych-entry
ENV PATH=/opt/diptych/bin:$PATH PYTHONUNBUFFERED=1 DIPTYCH_CACHE=/models HF_HOME=/models/huggingface
USER diptych
EXPOSE 50051
# Exec form, and the script ends in `exec`: the service itself is process 1 and hears SIGTERM.
ENTRYPOINT ["sh", "/usr/local/bin/diptych-entry"]

FROM runtime AS worker
COPY --from=tools /tcmalloc /usr/local/lib
COPY --from=worker-venv /opt/diptych /opt/diptych
COPY --from=code /code /opt/diptych

FROM runtime AS light
COPY --from=light-venv /opt/diptych /opt/diptych
COPY --from=code /code /opt/diptych
