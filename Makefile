# Everything a developer or CI does: check, test, demo, bench, lock. Works on a bare Linux machine; see bootstrap.sh.
# Environments are built once and kept; the first run downloads several GB. uv links them from its cache, so keep the
# cache (UV_CACHE_DIR) on the same file system as the checkout, or say UV_LINK_MODE=copy.

UV := .tools/uv
DRIVER := .venv/bin
ACTOR := envs/sgl_dtensor_v2/.venv/bin
PAIR := sgl_dtensor_v2
TRAINER_ENV := $(if $(filter sgl_megatron,$(PAIR)),megatron,automodel)
ENGINE_ENV := sglang_cpu

# Tests of what the driver runs: in its own environment, which has no torch. All others run in the actor's.
DRIVER_TESTS := $(addprefix tests/,test_imports.py test_config.py test_errors.py test_deadline.py test_rpc.py \
	test_envs.py test_doctor.py)
PYTEST := -m pytest --no-skips
ARGS :=

.PHONY: check test demo bench lock driver demo-envs test-envs

check: driver
	$(DRIVER)/ruff check .
	$(DRIVER)/ruff format --check .
	$(DRIVER)/mypy

# Both halves run whatever comes of the first, and the last line is pytest's.
test: driver test-envs
	@echo "== 1 of 2: driver environment (no torch): $(notdir $(DRIVER_TESTS))"
	@$(DRIVER)/python $(PYTEST) $(DRIVER_TESTS); first=$$?; \
	echo "== 2 of 2: actor environment sgl_dtensor_v2: all other tests"; \
	$(ACTOR)/python $(PYTEST) tests $(addprefix --ignore=,$(DRIVER_TESTS)) && exit $$first

demo: driver demo-envs
	$(DRIVER)/weightsync demo --pair $(PAIR) $(ARGS)

bench: driver demo-envs
	$(DRIVER)/weightsync bench $(ARGS)

lock:
	@./bootstrap.sh
	$(UV) lock
	for project in envs/*/; do $(UV) lock --project "$$project" || exit 1; done

# Exact: what the lock does not name is removed. Quick when nothing changed.
driver:
	@./bootstrap.sh
	@$(UV) sync --quiet --locked --extra driver --group dev

demo-envs: driver
	@$(DRIVER)/weightsync build $(PAIR) $(TRAINER_ENV) $(ENGINE_ENV)

test-envs: driver
	@$(DRIVER)/weightsync build sgl_dtensor_v2:test automodel megatron:test $(ENGINE_ENV) sglang_cpu_legacy
