//! Databases under typical load: PostgreSQL with a process per connection, redis with children that
//! save and replicas that take over, memcached with threads.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, ProcessError, run};
use portolan_bench::services::postgres::Postgres as Cluster;
use portolan_programs::{
    PYTHON, Pairing, STACKS, bed, client, counter, each_pairing, eventually, serve,
};
use rustix::process::{Pid, Signal, kill_process};

/// Time limit for a database to notice a change of its peers.
const SOON: Duration = Duration::from_secs(10);

/// A cluster whose queries use parallel workers for small tables, too.
const SETTINGS: &str = "max_connections = 60\nmin_parallel_table_scan_size = 0\n\
    parallel_setup_cost = 0\nparallel_tuple_cost = 0\n";

/// A database cluster.
struct Postgres(Cluster);

impl Postgres {
    fn new(bed: &Bed) -> Postgres {
        let cluster = Cluster::new(bed, bed.file("postgres"), SETTINGS);
        Postgres(cluster.unwrap_or_else(|error| panic!("{error}")))
    }

    fn serve(&self, bed: &Bed, stack: Stack) -> Background {
        let service = self.0.serve(bed, stack);
        service.unwrap_or_else(|error| panic!("{error}"))
    }

    fn client(&self, bed: &Bed, stack: Stack, program: &str, arguments: &[&str]) -> String {
        run(self.0.client(bed, stack, program).args(arguments))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs one statement, and returns psql's output.
    fn query(&self, bed: &Bed, stack: Stack, statement: &str) -> String {
        self.try_query(bed, stack, statement)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_query(&self, bed: &Bed, stack: Stack, statement: &str) -> Result<String, ProcessError> {
        run(&mut self.psql(bed, stack, statement))
    }

    /// Starts a client that waits for the result of a statement.
    fn start_query(&self, bed: &Bed, stack: Stack, statement: &str) -> Background {
        let mut psql = self.psql(bed, stack, statement);
        Background::start(psql.stderr(Stdio::null())).unwrap_or_else(|error| panic!("{error}"))
    }

    fn psql(&self, bed: &Bed, stack: Stack, statement: &str) -> Command {
        let mut command = self.0.client(bed, stack, "psql");
        command.args(["-X", "-At", "-c", statement]);
        command
    }
}

/// The postmaster accepts each client and forks a child for it.
#[test]
fn postgresql_serves_twenty_clients() {
    let bed = bed();
    let postgres = Postgres::new(&bed);
    each_pairing(&bed, |bed, Pairing { server, client }| {
        let _postgres = postgres.serve(bed, server);
        postgres.client(bed, client, "pgbench", &["-i", "-q", "postgres"]);
        for options in [&["-S", "-t", "100"][..], &["-t", "20"]] {
            let arguments = [&["-n", "-c", "20"], options, &["postgres"]].concat();
            let report = postgres.client(bed, client, "pgbench", &arguments);
            assert!(report.contains("failed transactions: 0 "), "{report}");
        }
        let sums = "select (select sum(abalance) from pgbench_accounts) = sum(delta), \
                    count(*) from pgbench_history";
        assert_eq!(postgres.query(bed, client, sums), "t|400");
    });
}

#[test]
fn postgresqls_helpers_leave_the_connections_alone() {
    let bed = bed();
    let postgres = Postgres::new(&bed);
    let _postgres = postgres.serve(&bed, Stack::Portolan);
    for (stack, name) in STACKS.into_iter().zip(["one", "two"]) {
        postgres.query(&bed, stack, &format!("create database {name}"));
        let rows = format!(
            "create table {name} as select n, md5(n::text) as text from generate_series(1, 100000) n"
        );
        postgres.query(&bed, stack, &rows);
        let counted = format!("select count(*) from {name} where text like '%ab%'");
        let plan = postgres.query(&bed, stack, &format!("explain analyze {counted}"));
        assert!(plan.contains("Workers Launched: 2"), "{plan}");
        let alone = format!("select count(*) filter (where text like '%ab%') from {name}");
        let count = |query: &str| postgres.query(&bed, stack, query);
        assert_eq!(count(&counted), count(&alone));
    }
}

/// The postmaster ends all of its children and restarts on the same listener.
#[test]
fn postgresql_outlives_the_crash_of_a_backend() {
    let bed = bed();
    let postgres = Postgres::new(&bed);
    let _postgres = postgres.serve(&bed, Stack::Portolan);
    let mut waiting = STACKS.map(|stack| postgres.start_query(&bed, stack, "select pg_sleep(60)"));
    let backends = || {
        let pids = "select pid from pg_stat_activity where query like '%(60)' \
                    and pid <> pg_backend_pid()";
        let pids = postgres.query(&bed, Stack::Kernel, pids);
        pids.lines()
            .map(|pid| pid.parse().expect("a number"))
            .collect::<Vec<i32>>()
    };
    let mut victims = Vec::new();
    assert!(eventually(SOON, || {
        victims = backends();
        victims.len() == 2
    }));
    let victim = Pid::from_raw(victims[0]).expect("a process");
    kill_process(victim, Signal::KILL).expect("it runs");
    for waiting in &mut waiting {
        assert!(waiting.wait(SOON), "the client does not hear of it");
    }
    let recovers = || {
        postgres
            .try_query(&bed, Stack::Portolan, "select 42")
            .is_ok_and(|it| it == "42")
    };
    assert!(eventually(SOON, recovers));
}

/// A redis server on one host, with a port of its own.
struct Redis {
    side: Side,
    address: String,
    port: &'static str,
    _process: Background,
}

impl Redis {
    fn start(bed: &Bed, side: Side, stack: Stack, options: &[&str]) -> Redis {
        let port = match side {
            Side::Server => "6379",
            Side::Client => "6380",
        };
        let address = bed.host(side).address.to_string();
        let directory = bed.file(&format!("redis-{side}"));
        fs::create_dir_all(&directory).expect("the bed's directory is writable");
        let mut command = bed.command(side, stack, "redis-server");
        command
            .args(["--bind", &address, "--port", port, "--protected-mode", "no"])
            .args(["--save", "", "--repl-diskless-sync-delay", "0"])
            .args(["--enable-debug-command", "yes", "--dir"])
            .arg(&directory)
            .args(options);
        let process = Background::start(&mut command).unwrap_or_else(|error| panic!("{error}"));
        let redis = Redis {
            side,
            address,
            port,
            _process: process,
        };
        assert!(eventually(SOON, || redis.try_ask(bed, &["PING"]).is_ok()));
        redis
    }

    /// Sends a command from the same host by the kernel's stack, which works on whichever stack the server is.
    fn ask(&self, bed: &Bed, words: &[&str]) -> String {
        self.try_ask(bed, words)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_ask(&self, bed: &Bed, words: &[&str]) -> Result<String, ProcessError> {
        let mut cli = bed.command(self.side, Stack::Kernel, "redis-cli");
        run(cli
            .args(["-e", "-h", &self.address, "-p", self.port])
            .args(words))
    }

    /// Returns true if INFO has this line.
    fn says(&self, bed: &Bed, line: &str) -> bool {
        let info = self.ask(bed, &["INFO"]);
        info.lines().any(|said| said.trim_end() == line)
    }
}

/// Has fifty clients store and fetch values, from the client host.
fn benchmark(bed: &Bed, stack: Stack, requests: &str) {
    let address = bed.server.address.to_string();
    let csv = client(
        bed,
        stack,
        "redis-benchmark",
        &[
            "-h", &address, "-c", "50", "-n", requests, "-r", "20000", "-t", "set,get", "--csv",
        ],
    );
    assert!(csv.contains("\"SET\"") && csv.contains("\"GET\""), "{csv}");
}

#[test]
fn redis_saves_by_children_while_it_serves() {
    each_pairing(&bed(), |bed, pairing| {
        let recalled = counter(bed, Side::Server, "server", "sessions_recalled");
        let redis = Redis::start(bed, Side::Server, pairing.server, &[]);
        redis.ask(bed, &["DEBUG", "POPULATE", "50000", "key", "100"]);
        std::thread::scope(|scope| {
            let load = scope.spawn(|| benchmark(bed, pairing.client, "30000"));
            while !load.is_finished() {
                for job in ["BGSAVE", "BGREWRITEAOF"] {
                    redis.ask(bed, &[job]);
                    assert!(eventually(SOON, || {
                        redis.says(bed, "rdb_bgsave_in_progress:0")
                            && redis.says(bed, "aof_rewrite_in_progress:0")
                    }));
                }
            }
        });
        assert!(redis.says(bed, "rdb_last_bgsave_status:ok"));
        assert!(redis.says(bed, "aof_last_bgrewrite_status:ok"));
        let digest = redis.ask(bed, &["DEBUG", "DIGEST"]);
        assert_eq!(redis.ask(bed, &["DEBUG", "RELOAD"]), "OK");
        assert_eq!(redis.ask(bed, &["DEBUG", "DIGEST"]), digest);
        assert_eq!(
            counter(bed, Side::Server, "server", "sessions_recalled"),
            recalled
        );
    });
}

#[test]
fn a_replica_of_redis_takes_over_and_gives_back() {
    each_pairing(&bed(), |bed, pairing| {
        let server = bed.server.address.to_string();
        let primary = Redis::start(bed, Side::Server, pairing.server, &[]);
        primary.ask(bed, &["DEBUG", "POPULATE", "20000", "key", "100"]);
        let follow = ["--replicaof", &server, "6379"];
        let replica = Redis::start(bed, Side::Client, pairing.client, &follow);
        benchmark(bed, pairing.client, "10000");
        in_step(bed, &primary, &replica);

        drop(primary);
        replica.ask(bed, &["REPLICAOF", "NO", "ONE"]);
        replica.ask(bed, &["SET", "meanwhile", "here"]);
        let client = bed.client.address.to_string();
        let follow = ["--replicaof", &client, "6380"];
        let returned = Redis::start(bed, Side::Server, pairing.server, &follow);
        in_step(bed, &replica, &returned);
        assert_eq!(returned.ask(bed, &["GET", "meanwhile"]), "here");

        replica.ask(bed, &["FAILOVER"]);
        assert!(eventually(SOON, || returned.says(bed, "role:master")));
        returned.ask(bed, &["SET", "again", "there"]);
        in_step(bed, &returned, &replica);
        assert_eq!(replica.ask(bed, &["GET", "again"]), "there");
    });
}

/// Checks that the replica has all data of the primary.
fn in_step(bed: &Bed, primary: &Redis, replica: &Redis) {
    assert!(eventually(SOON, || replica.says(bed, "master_link_status:up")));
    assert_eq!(primary.ask(bed, &["WAIT", "1", "10000"]), "1");
    let digest = |redis: &Redis| redis.ask(bed, &["DEBUG", "DIGEST"]);
    assert_eq!(digest(primary), digest(replica));
}

#[test]
fn memcached_serves_a_hundred_connections_with_four_threads() {
    each_pairing(&bed(), |bed, pairing| {
        let address = bed.server.address.to_string();
        let options = ["-u", "root", "-l", &address, "-U", "0", "-t", "4"];
        let _memcached = serve(bed, pairing.server, 11211, "memcached", &options);
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/memcached.py");
        let arguments = [script, &address, "11211", "100"];
        assert_eq!(client(bed, pairing.client, PYTHON, &arguments), "exact");
    });
}
