"""Files named agent.toml in which something is wrong, and the line that says so.

TMP stands for a directory of files with all kinds of modes (test_settings.py), `…` for what differs between machines or
between versions of a parser.
"""

from __future__ import annotations

ETCD = '[store]\nbackend="etcd"\nendpoints=["h:2379"]\n'
TLS = ETCD.replace("h:2379", "https://h")

BAD: list[tuple[str, str]] = [
    ("slot=4", "slot: is not a key; did you mean slots?"),
    ('slots="many"', "slots: must be a whole number or auto, not 'many'"),
    ("slots=0", "slots: must be from 1 to 4096"),
    ("slots=-1", "slots: must be from 1 to 4096"),
    ("slots=4096", "slots: 4096, but this machine has …"),
    ("slots=4097", "slots: must be from 1 to 4096"),
    ("slots=2.5", 'slots: must be a whole number or auto, not a number; write it as in slots = "auto"'),
    ("slots=true", 'slots: must be a whole number or auto, not true or false; write it as in slots = "auto"'),
    ('node=""', "node: '' must be printable, without '/', a leading '.' or spaces around it"),
    ('node="a/b"', "node: 'a/b' must be printable, without '/', a leading '.' or spaces around it"),
    ("node=3", 'node: must be text, not a whole number; write it as in node = "node-17"'),
    ('labels="a"', 'labels: must be a list, not text; write it as in labels = ["rack=7", "a100"]'),
    ('labels=["a b"]', "labels: 'a b' must be printable ASCII without spaces or commas, as in rack=7"),
    ("labels=[3]", "labels[0]: must be text, not a whole number"),
    ('user="nobody-at-all"', "user: 'nobody-at-all' does not exist on this machine; create it, or name another"),
    ('state_dir="var"', "state_dir: 'var' is not an absolute path; begin it with /"),
    ('state_dir="TMP/token"', "state_dir: 'TMP/token' is a file, not a directory"),
    (
        'run_dir="/a"\nstate_dir="/a"',
        "run_dir: is state_dir, too; what must not outlive a reboot needs a directory of its own",
    ),
    ('log_dir="TMP/token/x"', "log_dir: 'TMP/token' is a file, not a directory"),
    (
        'drain_timeout="soon"',
        "drain_timeout: 'soon' is not a time; write seconds or a unit, as in 500ms, 5s, 2m, 1.5h or 7d",
    ),
    ('refuse_timeout="500ms"', "refuse_timeout: 0.5 must be at least 1"),
    ("drain_timeout=-1", "drain_timeout: -1: a time cannot be negative"),
    ('drain_timeouts="5s"', "drain_timeouts: is not a key; did you mean drain_timeout?"),
    (
        'adopt_timeout="2s"',
        "adopt_timeout: 2 s must exceed lease 3 s + renewal 1 s, so that leases are judged again "
        "before any node counts as lost; raise it by more than 2 s",
    ),
    ("lease=0", "lease: 0 s must be more than 0 seconds"),
    (
        'renewal="5s"',
        "lease: 3 s must exceed renewal 5 s + 2 × store_timeout 0.9 s, so that a renewal that fails "
        "can be tried once more; raise it by more than 3.8 s",
    ),
    ('keep_ended="400d"', "keep_ended: '400d' is longer than a year; at most 365d"),
    ("keep_ended=true", "keep_ended: true is not a time; write seconds or a unit, as in 500ms, 5s, 2m, 1.5h or 7d"),
    ('store="etcd"', "store: must be a table, not text; write [store]"),
    (
        '[store]\nbackend="c10d"',
        "store.backend: c10d has no password, so anybody who reaches it could run programs here, and loses all jobs "
        "when its host ends; write etcd, or local for a node that works alone",
    ),
    ('[store]\nbackend="redis"', "store.backend: must be local or etcd, not 'redis'"),
    (
        '[store]\nbackend="etcd"',
        'store.endpoints: is missing; where etcd is, as in endpoints = ["https://10.0.0.1:2379"]',
    ),
    ('[store]\nendpoints=["h:1"]', 'store.endpoints: is etcd\'s, but store.backend is local; write backend = "etcd"'),
    ('[store]\nca="/x"', 'store.ca: is etcd\'s, but store.backend is local; write backend = "etcd"'),
    ('[store]\nbackend="etcd"\nendpoint="h:1"', 'store.endpoint: is not a key here: write endpoints = ["HOST:PORT"]'),
    (
        '[store]\nbackend="etcd"\nendpoints="h:1"',
        'store.endpoints: must be a list, not text; write it as in endpoints = ["https://10.0.0.1:2379"]',
    ),
    ('[store]\nbackend="etcd"\nendpoints=["h:99999"]', "store.endpoints: 'h:99999' has no valid port; …"),
    (
        '[store]\nbackend="etcd"\nendpoints=["https://h:1","h2:1"]',
        "store.endpoints: 'https://h:1,h2:1': write https:// before all of them, or before none",
    ),
    (
        '[store]\nbackend="etcd"\nendpoints=["user:pw@h:1"]',
        "store.endpoints: hold a user; write user and password_file instead",
    ),
    ('[store]\nbackend="etcd"\nendpoints=["a_b c"]', "store.endpoints: 'a_b c': 'a_b c' is not the name of a host"),
    (
        '[store]\nbackend="etcd"\nendpoints=[""]',
        "store.endpoints: '' is not HOST:PORT; write one in each pair of quotes",
    ),
    (
        '[store]\nbackend="etcd"\nendpoints=["ftp://h"]',
        "store.endpoints: 'ftp://h': ftp:// is not understood for etcd; http:// or https:// is",
    ),
    (ETCD + 'user="u"', "store.password_file: is missing, but store.user is given; they come together"),
    (
        ETCD + 'password_file="TMP/token"',
        "store.user: is missing, but store.password_file is given; they come together",
    ),
    (
        ETCD + 'password="hunter2"',
        "store.password: is not a key here: secrets are in files of their own; write password_file",
    ),
    (
        ETCD + 'user="u"\npassword_file="TMP/open"',
        "store.password_file: 'TMP/open': anybody can read it (mode 0644); chmod 600 TMP/open",
    ),
    (
        ETCD + 'user="u"\npassword_file="TMP/none"',
        "store.password_file: 'TMP/none' cannot be found: No such file or directory",
    ),
    (
        ETCD + 'user="u"\npassword_file="TMP/two"',
        "store.password_file: 'TMP/two' must hold one line, the secret, of at most 1024 characters",
    ),
    (ETCD + 'user="u"\npassword_file="TMP/empty"', "store.password_file: 'TMP/empty' is empty"),
    (ETCD + 'user="u"\npassword_file="TMP/dir"', "store.password_file: 'TMP/dir' is not a file"),
    (
        ETCD + 'user="u"\npassword_file="TMP/gw"',
        "store.password_file: 'TMP/gw': its group can change it and replace the secret (mode 0660); chmod 600 TMP/gw",
    ),
    (ETCD + 'cert="TMP/pem"', "store.key: is missing, but store.cert is given; they come together"),
    (ETCD + 'key="TMP/key"', "store.cert: is missing, but store.key is given; they come together"),
    (ETCD + 'ca="TMP/none"', "store.ca: 'TMP/none' does not exist"),
    (ETCD + 'ca="ca.pem"', "store.ca: 'ca.pem' is not an absolute path; begin it with /"),
    (
        ETCD + 'cert="TMP/pem"\nkey="TMP/pem"',
        "store.key: 'TMP/pem': anybody can read it (mode 0644); chmod 600 TMP/pem",
    ),
    (
        '[store]\nbackend="etcd"\nendpoints=["http://h:2379"]\nca="TMP/pem"',
        "store.ca: is for TLS, but store.endpoints say http://; write https://",
    ),
    ("[http]\nport=70000", "http.port: must be from 0 to 65535"),
    ('[http]\nport="9411"', "http.port: must be a whole number, not text; write it as in port = 9411"),
    ("[http]\nport=-1", "http.port: must be from 0 to 65535"),
    ('[http]\nbind=""', "http.bind: '' is no address to listen on, as in 127.0.0.1, 0.0.0.0 or ::"),
    (
        '[http]\nbind="0.0.0.0:80"',
        "http.bind: '0.0.0.0:80' must be an address alone, without brackets; the port is http.port",
    ),
    ('[http]\nbind="[::]"', "http.bind: '[::]' must be an address alone, without brackets; the port is http.port"),
    ('[http]\nbind="a b"', "http.bind: 'a b' is no address to listen on, as in 127.0.0.1, 0.0.0.0 or ::"),
    ('[http]\nhost="x"', "http.host: is not a key here: write bind"),
    ('[http]\ntoken="abc"', "http.token: is not a key here: secrets are in files of their own; write token_file"),
    (
        '[http]\ntoken_file="TMP/open"',
        "http.token_file: 'TMP/open': anybody can read it (mode 0644); chmod 600 TMP/open",
    ),
    (
        '[http]\ntoken_file="TMP/token"\nagents_token_file="TMP/group"',
        "http.agents_token_file: holds the token of http.token_file, which may do more; it needs another",
    ),
    ('[http]\ntoken_file="token"', "http.token_file: 'token' is not an absolute path; begin it with /"),
    ("[http]\ntoken_file=3", "http.token_file: 3 is not a path; write it as text, as in /srv/data"),
    (TLS + 'ca="TMP/text"', "store.ca: 'TMP/text' holds no certificate in PEM form"),
    (
        TLS + 'cert="TMP/cert"\nkey="TMP/otherkey"',
        "store.cert: 'TMP/cert' and key 'TMP/otherkey' do not belong together",
    ),
    (
        '[http]\ntls_cert="TMP/text"\ntls_key="TMP/key"',
        "http.tls_cert: 'TMP/text' and key 'TMP/key' are not a certificate and its key in PEM form",
    ),
    ('[http]\ntls_ca="TMP/text"', "http.tls_ca: 'TMP/text' holds no certificate in PEM form"),
    ('[http]\ntokens={"a b"="TMP/x"}', "http.tokens: 'a b' must be a name of letters, digits, - _ and ."),
    ('[http]\nread_only=["bob"]', "http.read_only: 'bob' is not one of http.tokens"),
    (
        '[http.tokens]\nbob="TMP/short"',
        "http.tokens.bob: 'TMP/short' must hold at least 32 characters of ASCII; openssl rand -hex 32 makes a good "
        "token",
    ),
    (
        '[http]\ntoken_file="TMP/short"',
        "http.token_file: 'TMP/short' must hold at least 32 characters of ASCII; openssl rand -hex 32 makes a good "
        "token",
    ),
    ('[http]\ntls_cert="TMP/pem"', "http.tls_key: is missing, but http.tls_cert is given; HTTPS needs both"),
    (
        '[http]\ntls_cert="TMP/pem"\ntls_key="TMP/pem"',
        "http.tls_key: 'TMP/pem': anybody can read it (mode 0644); chmod 600 TMP/pem",
    ),
    ('[http]\nsocket="TMP/dir"', "http.socket: 'TMP/dir' is a directory, not a socket"),
    ('[http]\ntls_ca="TMP/none"', "http.tls_ca: 'TMP/none' does not exist"),
    (
        '[http]\ntls_name="agents"',
        "http.tls_name: is given, but http.tls_cert is not: without it the agent does not serve HTTPS",
    ),
    (
        '[http]\nusers=["nobody-at-all"]',
        "http.users: there is no 'nobody-at-all' on this machine; give an existing name, or a number",
    ),
    (
        '[http]\ngroups=["nobody-at-all"]',
        "http.groups: there is no 'nobody-at-all' on this machine; give an existing name, or a number",
    ),
    ('[http]\nusers="root"', 'http.users: must be a list, not text; write it as in users = ["alice"]'),
    ("[health]\nevery=0", "health.every: 0s must be more than 0 seconds"),
    (
        '[health]\nevery="5s"',
        "health.every: 5s must exceed plugin_timeout 10s, so that one look is over before the next "
        "begins; raise it by more than 5 s",
    ),
    (
        '[health]\nplugin_timeout="2m"',
        "health.every: 1m must exceed plugin_timeout 2m, so that one look is over before the next "
        "begins; raise it by more than 60 s",
    ),
    (
        '[health]\ndisk_free_min="10 %"',
        "health.disk_free_min: '10 %' is not a size; write bytes or a unit, as in 500MB or 10GiB",
    ),
    (
        "[health]\ndisk_free_min=-1",
        "health.disk_free_min: -1 is not a size; write bytes or a unit, as in 500MB or 10GiB",
    ),
    ("[health]\nstrikes=0", "health.strikes: must be at least 1"),
    ("[limits]\njob_cpu_weight=20000", "limits.job_cpu_weight: must be from 1 to 10000"),
    ("[limits]\njob_pids=0", "limits.job_pids: must be from 1 to 4194304"),
    ("[limits]\njobs_per_submitter=0", "limits.jobs_per_submitter: must be at least 1"),
    ('[health]\ncooloff="2h"', "health.cooloff_max: 1h must not be less than cooloff 2h; raise it by 3600 s"),
    ('[health]\nplugins_dir="TMP/token"', "health.plugins_dir: 'TMP/token' is a file, not a directory"),
    (
        '[health]\nall_reduce="yes"',
        "health.all_reduce: must be true or false, not text; write it as in all_reduce = true",
    ),
    (
        '[health]\ndirectories="/x"',
        'health.directories: must be a list, not text; write it as in directories = ["/checkpoints"]',
    ),
    ('[health]\ndirectories=["x"]', "health.directories[0]: 'x' is not an absolute path; begin it with /"),
    ("[health]\ngpus=-1", "health.gpus: must be at least 0"),
    ('[limits]\ncommands=["train.py"]', "limits.commands: 'train.py' is not an absolute path; begin it with /"),
    ('[limits]\nusers=[""]', "limits.users: holds an empty entry; leave it out"),
    ('[limits]\ndirectories=["srv"]', "limits.directories[0]: 'srv' is not an absolute path; begin it with /"),
    ('[limits]\ncommand=["/x"]', "limits.command: is not a key; did you mean commands?"),
    ('[[job]]\nid="x"', "job: is not a key here: submit each job with elasticd submit FILE"),
    ("[jobs]\n", "jobs: is not a key here: submit each job with elasticd submit FILE"),
    ('token="abc"', "token: is not a key here: secrets are in files of their own; write token_file below [http]"),
    ('etcd="x"', 'etcd: is not a key here: write [store] with backend = "etcd"'),
    ('a"b=1', "is not TOML: …"),
    ('"a\\nb"=1', "a\\nb: is not a key; elasticd config example lists them"),
    ('node="a"\nnode="b"', "is not TOML: a key is given twice…"),
    (
        '[agent]\nnode="x"',
        "agent: is not a key here: this file is all about the agent; tables are [store], [http], [health] and [limits]",
    ),
    ('workdir="/x"', "workdir: is not a key here: it is a job's; write it in a job file"),
    ("nnodes=3", "nnodes: is not a key; did you mean node?"),
]
