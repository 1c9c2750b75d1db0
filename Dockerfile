# The quickstart in a container, as an ordinary user and on the CPU:
#   docker build -t lightning_fed .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" lightning_fed
# For a GPU, the same with PyPI's torch, which is built for CUDA:
#   docker build --build-arg TORCH_INDEX=https://pypi.org/simple -t lightning_fed:cuda .
#   docker run --rm --gpus all -v "$PWD:/work" --user "$(id -u):$(id -g)" lightning_fed:cuda lightning-fed fit --config quickstart
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS torch
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} torch torchvision
RUN useradd --create-home fed

# What the development container has besides; the checkout is mounted into it.
FROM torch AS development
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
USER fed

FROM torch AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM torch
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[html,notebook,study]"
# Any user may write here, also one of `docker run --user` who has no name and no home.
ENV HOME=/tmp USER=fed
WORKDIR /work
RUN chmod 1777 /work
USER fed
CMD ["sh", "-c", "lightning-fed study quickstart --jobs 2 && lightning-fed report --study quickstart"]
