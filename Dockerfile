# The quickstart in a container, as an ordinary user:
#   docker build -t lightning_fed .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" lightning_fed
# The torch that pip finds is built for CPUs and for CUDA, so the same image runs on a GPU:
#   docker run --rm --gpus all -v "$PWD:/work" --user "$(id -u):$(id -g)" lightning_fed lightning-fed fit --config quickstart
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS torch
RUN pip install --no-cache-dir torch torchvision
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
