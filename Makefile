# The commands for contributors. `make help` lists them; they need Python 3.11+ and make.

PYTHON  ?= python3
VENV    ?= .venv
LOWEST  ?= $(VENV)-lowest
PATRONI ?= $(VENV)-failover
UV      ?= uv
# Two for each of two cores: half of the time of a test is waiting for servers and processes.
WORKERS ?= 4
DYNALITE = 4.0.0
SBIN    ?= /usr/sbin:/usr/local/sbin
TESTS   ?= tests
ARGS    ?=

PY  = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check --quiet

# The library, and the distributions beside it.
PROJECTS = pyproject.toml $(wildcard packages/*/pyproject.toml)
EDITABLE = --no-deps --no-build-isolation $(patsubst %/,-e %,$(dir $(addprefix ./,$(PROJECTS))))

.DEFAULT_GOAL := help
.PHONY: help install run test test-more test-all lowest browser pooler promtool systemd dynalite mariadb mysql redis peers check bench docs docs-serve release-check soak torture mutants race failover pins clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  ARGS="..." is passed on to the program that a target starts; TESTS="tests/core" runs all tests of a folder or file.'

install: $(VENV)/.run ## Create .venv with the packages that `make run` needs
	@echo "$(VENV)/bin/oncekey is ready; make run starts the demo"

run: $(VENV)/.run ## Serve the demo (ARGS="--port 8001 --store ...")
	$(VENV)/bin/oncekey-demo $(ARGS)

# The table in tests/harness/selection.py lists the fast tests. TESTS names folders or files, whose tests all run.
SUITE = $(if $(filter tests,$(TESTS)),--suite=$(1))
PYTEST = $(PY) -m pytest -n $(WORKERS) --durations=10

test: $(VENV)/.dev ## Run the fast tests, on SQLite and PostgreSQL (TESTS=..., WORKERS=..., ARGS="-k proxy")
	$(PYTEST) $(call SUITE,fast) $(TESTS) $(ARGS)

test-more: $(VENV)/.dev browser pooler promtool systemd dynalite mariadb mysql redis peers ## Run all other tests, on every database and server and in a browser
	$(PYTEST) $(call SUITE,more) $(TESTS) $(ARGS)

test-all: ## Run all tests
	$(if $(filter tests,$(TESTS)),$(MAKE) test)
	$(MAKE) test-more

lowest: $(LOWEST)/.made pooler dynalite mariadb mysql ## Run the tests of frameworks, drivers and clients with the lowest supported versions
	ONCEKEY_TEST_DYNALITE="$${ONCEKEY_TEST_DYNALITE:-$(abspath $(VENV))/dynalite/node_modules/.bin/dynalite}" \
		$(LOWEST)/bin/python -m pytest -n $(WORKERS) $(LOWEST_TESTS) $(ARGS)

browser: ## Install Chromium for the tests, on Debian, as root; no-op if it is installed
	@if [ -n "$$ONCEKEY_TEST_BROWSER" ] || which chromium chromium-browser google-chrome google-chrome-stable 2>/dev/null \
		| grep -q .; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo 'no Chromium is here: installing it by apt-get, for the tests of the demo'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	else \
		echo 'no Chromium is here, and tests/demo/test_browser.py will fail: install it (Debian: apt-get install chromium),' \
			'name it in ONCEKEY_TEST_BROWSER, or run $(VENV)/bin/playwright install chromium' >&2; \
	fi

pooler: ## Install PgBouncer for the tests, on Debian, as root; no-op if it is installed
	@if [ -n "$$ONCEKEY_TEST_PGBOUNCER" ] || PATH="$$PATH:$(SBIN)" command -v pgbouncer >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo 'no PgBouncer is here: installing it by apt-get, for the tests of the drivers'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pgbouncer >/dev/null; \
	else \
		echo 'no PgBouncer is here, and tests/drivers/postgres/test_pgbouncer.py will fail: install it' \
			'(Debian: apt-get install pgbouncer), or name it in ONCEKEY_TEST_PGBOUNCER' >&2; \
	fi

# The package is taken apart and not installed: installing it would start a server.
promtool: ## Install promtool for the tests, on Debian, as root; no-op if it is installed
	@if [ -n "$$ONCEKEY_TEST_PROMTOOL" ] || PATH="$$PATH:$(VENV)/bin" command -v promtool >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo 'no promtool is here: taking it out of the package prometheus by apt-get, for the tests of contrib'; \
		apt-get update -qq && mkdir -p $(VENV)/bin $(VENV)/prometheus && cd $(VENV)/prometheus \
			&& apt-get download -qq -o APT::Sandbox::User=root prometheus && dpkg -x prometheus_*.deb . \
			&& mv usr/bin/promtool ../bin && rm -rf ../prometheus; \
	else \
		echo 'no promtool is here, and tests/kit/test_alerts.py will fail: install it (it comes with Prometheus),' \
			'or name it in ONCEKEY_TEST_PROMTOOL' >&2; \
	fi

systemd: ## Install systemd-analyze for the tests, on Debian, as root; no-op if it is installed
	@if [ -n "$$ONCEKEY_TEST_SYSTEMD_ANALYZE" ] || command -v systemd-analyze >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo 'no systemd-analyze is here: installing it by apt-get, for the tests of contrib'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends systemd >/dev/null; \
	else \
		echo 'no systemd-analyze is here, and tests/kit/test_running.py will fail: install it (Debian: apt-get install systemd),' \
			'or name it in ONCEKEY_TEST_SYSTEMD_ANALYZE' >&2; \
	fi

# Into a folder of its own, by the version that is pinned here; what it needs is what npm finds for that version.
dynalite: ## Install dynalite for the tests, by npm; no-op if it is installed
	@if [ -n "$$ONCEKEY_TEST_DYNALITE" ] || [ -x $(VENV)/dynalite/node_modules/.bin/dynalite ]; then :; \
	elif command -v npm >/dev/null; then \
		echo 'no dynalite is here: installing it by npm into $(VENV)/dynalite, for the tests of DynamoDB'; \
		mkdir -p $(VENV)/dynalite && cd $(VENV)/dynalite \
			&& npm install --silent --no-fund --no-audit --no-save --ignore-scripts --prefix . dynalite@$(DYNALITE); \
	else \
		echo 'no dynalite is here, and tests/dynamodb will fail: install npm, or name the program in' \
			'ONCEKEY_TEST_DYNALITE' >&2; \
	fi

# Each into an environment of its own, by hashes; the lock file of npm has no addresses in it (omit-lockfile-registry-resolved).
peers: $(VENV)/.dev ## Install the pinned packages that tests/peers judges (pip, npm)
	@$(PY) -m bench.prepared idemkit asgi-idempotency-header django-idempotency-key \
		|| echo 'tests/peers/test_judged.py will fail: pip cannot install the pins of bench/peers' >&2
	@if cmp -s bench/peers/express-idempotency/package-lock.json $(VENV)/express-idempotency/package-lock.json; then :; \
	elif command -v npm >/dev/null; then \
		echo 'installing express-idempotency with its pins'; \
		rm -rf $(VENV)/express-idempotency $(VENV)/express-idempotency.part \
			&& cp -R bench/peers/express-idempotency $(VENV)/express-idempotency.part && cd $(VENV)/express-idempotency.part \
			&& npm ci --silent --no-fund --no-audit --ignore-scripts && mv ../express-idempotency.part ../express-idempotency; \
	else \
		echo 'no npm is here, and tests/peers/test_judged.py will fail: install Node.js with npm' >&2; \
	fi

# Taken apart, like promtool: installing the package would start a server. Galera's library and what copies a node come along.
MARIADB_PACKAGES = mariadb-server-core mariadb-server mariadb-client-core galera-4 liburing2 rsync libpopt0 libxxhash0 \
	$$(apt-cache show libaio1 >/dev/null 2>&1 && echo libaio1 || echo libaio1t64)
mariadb: ## Install MariaDB for the tests, on Debian, as root; no-op if it is installed
	@if [ -n "$$ONCEKEY_TEST_MARIADB" ] || [ -x $(VENV)/mariadb/usr/sbin/mariadbd ]; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo 'no MariaDB is here: taking it out of its packages by apt-get, for the tests of the store'; \
		rm -rf $(VENV)/mariadb.part && apt-get update -qq && mkdir -p $(VENV)/mariadb.part && cd $(VENV)/mariadb.part \
			&& apt-get download -qq -o APT::Sandbox::User=root $(MARIADB_PACKAGES) \
			&& for one in *.deb; do dpkg -x $$one . || exit 1; done && rm *.deb && mv ../mariadb.part ../mariadb; \
	else \
		echo 'no MariaDB is here, and tests of its store will fail: name the folder of one in ONCEKEY_TEST_MARIADB' \
			'(with usr/sbin/mariadbd in it; / where the package mariadb-server is installed)' >&2; \
	fi

# Debian has MySQL in its unstable distribution only. It is taken from the machine's own mirror with all that it needs, down to the
# C library, and run by that: nothing is installed, and the machine's list of packages stays as it is.
MYSQL_APT = apt-get -qq -o Dir::Etc::sourcelist=$$PWD/apt/list -o Dir::Etc::sourceparts=- -o Dir::State=$$PWD/apt \
	-o Dir::State::status=/dev/null -o Dir::Cache=$$PWD/apt -o APT::Sandbox::User=root
mysql: ## Install MySQL for the tests, on Debian, as root; no-op if it is installed
	@if [ -n "$$ONCEKEY_TEST_MYSQL" ] || [ -x $(VENV)/mysql/usr/sbin/mysqld ]; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo 'no MySQL is here: taking it out of its packages by apt-get, for the tests of the store'; \
		rm -rf $(VENV)/mysql.part && apt-get update -qq && mkdir -p $(VENV)/mysql.part/apt/lists/partial \
			$(VENV)/mysql.part/apt/archives/partial && cd $(VENV)/mysql.part \
			&& apt-get indextargets --format 'deb $$(REPO_URI) sid main' 'Origin: Debian' 'Component: main' 'Created-By: Packages' \
				| grep -v security | head -n 1 > apt/list \
			&& $(MYSQL_APT) update && $(MYSQL_APT) install -y --no-install-recommends --download-only mysql-server-core >/dev/null \
			&& for one in apt/archives/*.deb; do dpkg -x $$one . || exit 1; done \
			&& rm -rf apt usr/share/doc usr/share/man usr/share/locale && mv ../mysql.part ../mysql; \
	else \
		echo 'no MySQL is here, and tests of its store will fail: name the folder of one in ONCEKEY_TEST_MYSQL' \
			'(with usr/sbin/mysqld in it, and the libraries that it needs)' >&2; \
	fi

# The Valkey that the development requirements bring is built without TLS; Debian's Redis has it.
REDIS_PACKAGES = redis-server redis-tools libatomic1 libjemalloc2 liblzf1
redis: ## Install Redis with TLS for the tests, on Debian, as root; no-op if it is installed
	@if [ -n "$$ONCEKEY_TEST_REDIS" ] || [ -e $(VENV)/redis/usr/bin/redis-server ]; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo 'no Redis with TLS is here: taking it out of its packages by apt-get, for the tests of the store'; \
		rm -rf $(VENV)/redis.part && apt-get update -qq && mkdir -p $(VENV)/redis.part && cd $(VENV)/redis.part \
			&& apt-get download -qq -o APT::Sandbox::User=root $(REDIS_PACKAGES) \
			&& for one in *.deb; do dpkg -x $$one . || exit 1; done && rm *.deb && mv ../redis.part ../redis; \
	else \
		echo 'no Redis with TLS is here, and tests/stores/test_redis_tls.py will fail: name the folder of one in' \
			'ONCEKEY_TEST_REDIS (with usr/bin/redis-server in it; / where the package redis-server is installed)' >&2; \
	fi

check: $(VENV)/.dev ## Check lint, format, types, generated drivers and the direction of imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m tools.twins --check
	MYPYPATH=tests $(PY) -m mypy --strict -p oncekey -p oncekey_check -p oncekey_client -p oncekey_contract -p oncekey_demo -p tools -p harness -p proof.model -p proof.sim -p proof.crash
	$(VENV)/bin/lint-imports

bench: $(VENV)/.dev ## Compare oncekey with unprotected routes and other packages (ARGS="--only local,replay")
	$(PY) -m bench $(ARGS)

docs: $(VENV)/.dev ## Build the documentation as a site, in site/ (open site/index.html)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict $(ARGS)
	@echo 'site/index.html is ready'

docs-serve: $(VENV)/.dev ## Serve the documentation while you write it (ARGS="--dev-addr 127.0.0.1:8003")
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve --quiet $(ARGS)

# The tests of the distributions, on the wheels that will be uploaded; pip installs what they need.
release-check: $(VENV)/.dev ## Build the distributions into dist/, install each into a new environment, and run the README's program and the demo
	rm -rf dist && for one in $(dir $(PROJECTS)); do (cd $$one && $(abspath $(PY)) -m hatchling build -d $(abspath dist)) || exit 1; done
	ONCEKEY_TEST_RELEASE=dist $(PY) -m pytest tests/meta/test_wheel.py tests/meta/test_distributions.py $(ARGS)
	@ls -l dist

soak: $(VENV)/.dev ## Kill a client with a journal 50 times during 1,000 operations over a bad network (minutes)
	$(PY) tests/soak/client_soak.py $(or $(ARGS),--operations 1000 --kills 50)

torture: $(VENV)/.dev dynalite mariadb mysql ## Run torture on every store, on private servers, five minutes each (ARGS="--seconds 60 --store redis --seed 7")
	$(PY) tests/soak/torture_soak.py $(ARGS)

mutants: $(VENV)/.dev ## Drop each guard of each SQL statement in turn, on SQLite and PostgreSQL, and check that a test fails (five minutes)
	for one in sqlite postgres; do PYTHONPATH=tests $(PY) -m harness.mutating $$one --report $(VENV)/mutants.jsonl $(ARGS) || exit 1; done

race: $(VENV)/.dev dynalite mariadb mysql ## Let 8 processes race for 2,000 keys on every store (ARGS="--rounds 500 --store redis --seed 7")
	$(PY) tests/soak/race_soak.py $(ARGS)

failover: $(PATRONI)/.made ## Run torture on two servers under Patroni, and kill the leader (a minute; ARGS="--seconds 60 --seed 7")
	$(PATRONI)/bin/python tests/soak/failover_soak.py $(ARGS)

# Everything is compiled from the projects, and the check at the end keeps registries' addresses out of the tree.
COMPILE = $(UV) pip compile $(PROJECTS) --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--no-emit-package oncekey

pins: ## For maintainers, with uv: compile requirements/*.txt (ARGS=--upgrade)
	$(COMPILE) --extra postgres --extra asyncpg --group build $(ARGS) -o requirements/run.txt
	$(COMPILE) --all-extras --group dev --group build -c requirements/run.txt $(ARGS) -o requirements/dev.txt
	$(COMPILE) --all-extras --group lowest --group build --resolution lowest-direct $(ARGS) -o requirements/lowest.txt
	$(COMPILE) --extra postgres --extra asyncpg --group failover --group build -c requirements/dev.txt $(ARGS) \
		-o requirements/failover.txt
	@if grep -n '://' requirements/*.txt; then echo 'pins must not name a host' >&2; exit 1; fi

clean: ## Remove .venv, caches and builds (the demo's database stays)
	rm -rf .venv .venv-lowest .venv-failover .venv-bench bench-results site dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src packages tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# Empty when $(PYTHON) will do, else the one line that says what is wrong; the code must parse on any Python 3.
PYTHON_PROBLEM = $(shell $(PYTHON) -c "import sys; from importlib.util import find_spec; print( \
	'oncekey needs Python 3.11 or newer and $(PYTHON) is ' + sys.version.split()[0] + ': make PYTHON=python3.12' \
	if sys.version_info < (3, 11) else '' if find_spec('venv') and find_spec('ensurepip') else \
	'$(PYTHON) has no venv module: install it (Debian and Ubuntu: apt install python3-venv)')" 2>/dev/null \
	|| echo 'oncekey needs Python 3.11 or newer and $(PYTHON) does not run: make PYTHON=python3.12')

# Stamps, so that a repeated command starts at once.
$(VENV)/.made:
	$(if $(PYTHON_PROBLEM),$(error $(PYTHON_PROBLEM)))
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made requirements/run.txt $(PROJECTS)
	$(PIP) install --require-hashes -r requirements/run.txt
	$(PIP) install $(EDITABLE)
	@touch $@

# What the lowest versions are tried on: each extra where it touches another package's interface.
LOWEST_TESTS = tests/frameworks tests/flask_apps tests/django_shop tests/litestar_server tests/drivers --ignore=tests/drivers/postgres/test_every_byte.py \
	tests/client/test_aiohttp.py tests/client/test_httpx.py tests/client/test_requests.py \
	tests/console/test_access.py tests/console/test_pages.py \
	tests/contract/test_dynamodb_contract.py::TestAiobotocoreOnDynalite \
	tests/stores/test_redis.py tests/upkeep/test_limits.py tests/phased/test_completer.py tests/cli/test_migrate.py tests/cli/test_doctor.py tests/cli/test_routes.py

$(LOWEST)/.made: requirements/lowest.txt $(PROJECTS)
	$(if $(PYTHON_PROBLEM),$(error $(PYTHON_PROBLEM)))
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r requirements/lowest.txt
	$(LOWEST)/bin/python -m pip --disable-pip-version-check --quiet install $(EDITABLE)
	@touch $@

$(PATRONI)/.made: requirements/failover.txt $(PROJECTS)
	$(if $(PYTHON_PROBLEM),$(error $(PYTHON_PROBLEM)))
	$(PYTHON) -m venv --clear $(PATRONI)
	$(PATRONI)/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r requirements/failover.txt
	$(PATRONI)/bin/python -m pip --disable-pip-version-check --quiet install $(EDITABLE)
	@touch $@

$(VENV)/.dev: $(VENV)/.made requirements/dev.txt $(PROJECTS)
	$(PIP) install --require-hashes -r requirements/dev.txt
	$(PIP) install $(EDITABLE)
	@touch $@ $(VENV)/.run
