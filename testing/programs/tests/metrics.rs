//! Prometheus scrapes `portolan metrics`; the rules and the dashboard of `contrib/` use metrics that exist.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::connect;
use portolan_programs::{PYTHON, bed, eventually, file, serve};

const EXPORTER: &str = "127.0.0.1:9469";
const PROMETHEUS: &str = "127.0.0.1:9090";

const PORT: u16 = 7091;

/// Reads the first byte of a connection; its child echoes the second, for which the session has to migrate.
const FORKING: &str = "import os, socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
connection = listener.accept()[0]
connection.recv(1)
child = os.fork()
if child == 0:
    connection.sendall(connection.recv(1))
    os._exit(0)
os.waitpid(child, 0)
connection.recv(1)";

fn contrib(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../contrib")
        .join(path)
}

fn exporter(bed: &Bed) -> Background {
    let mut command = bed.own_command(Side::Server);
    command.args(["metrics", "--listen", EXPORTER]);
    Background::start(&mut command).expect("the exporter starts")
}

fn prometheus(bed: &Bed) -> Background {
    let configuration = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
         rule_files: [{}]\n\
         scrape_configs:\n- job_name: portolan\n  static_configs: [{{targets: [{EXPORTER:?}]}}]\n",
        contrib("prometheus/portolan.rules.yml").display()
    );
    let configuration = file(bed, "prometheus.yml", configuration);
    let mut command = bed.command(Side::Server, Stack::Kernel, "prometheus");
    command.args([
        format!("--config.file={configuration}"),
        format!("--storage.tsdb.path={}", bed.file("prometheus").display()),
        format!("--web.listen-address={PROMETHEUS}"),
        "--log.level=error".to_owned(),
    ]);
    Background::start(&mut command).expect("Prometheus starts")
}

/// Returns the answer of Prometheus to a query, in JSON.
fn query(bed: &Bed, query: &str) -> String {
    let mut command = bed.command(Side::Server, Stack::Kernel, "curl");
    command.args(["-s", "-G", "--data-urlencode"]);
    command.arg(format!("query={query}"));
    command.arg(format!("http://{PROMETHEUS}/api/v1/query"));
    run(&mut command).unwrap_or_default()
}

fn await_value(bed: &Bed, of: &str, value: &str) {
    let expected = format!("\"{value}\"]");
    let mut last = String::new();
    let found = eventually(Duration::from_secs(20), || {
        last = query(bed, of);
        last.contains(&expected)
    });
    assert!(found, "{of} is not {value}: {last}");
}

#[test]
fn prometheus_scrapes_the_server() {
    let mut bed = bed();
    let address = bed.server.address.to_string();
    let _redis = serve(
        &bed,
        Stack::Portolan,
        6379,
        "redis-server",
        &[
            "--bind",
            &address,
            "--port",
            "6379",
            "--protected-mode",
            "no",
            "--save",
            "",
        ],
    );
    let _exporter = exporter(&bed);
    let _prometheus = prometheus(&bed);
    await_value(&bed, "portolan_up", "1");
    await_value(
        &bed,
        "portolan_sessions{protocol=\"tcp\",state=\"LISTEN\"}",
        "1",
    );
    await_value(
        &bed,
        "portolan_program_sessions{program=\"redis-server\"} >= bool 1",
        "1",
    );

    let _forking = serve(
        &bed,
        Stack::Portolan,
        PORT,
        PYTHON,
        &["-c", FORKING, &address, &PORT.to_string()],
    );
    let mut stream = connect(&bed, PORT);
    stream.write_all(b"ab").expect("it is connected");
    let mut echoed = [0];
    stream.read_exact(&mut echoed).expect("the child answers");
    assert_eq!(echoed, *b"b");
    await_value(&bed, "portolan_tcp_round_trip_seconds_count >= bool 1", "1");
    await_value(
        &bed,
        "histogram_quantile(0.5, portolan_tcp_round_trip_seconds_bucket) < bool 0.1",
        "1",
    );
    for kind in ["cache", "flush", "recall"] {
        let count = format!("portolan_migration_seconds_count{{kind={kind:?}}} >= bool 1");
        await_value(&bed, &count, "1");
    }

    // The exporter outlives the server, and reports its end.
    drop(bed.daemon(Side::Server).take());
    await_value(&bed, "portolan_up", "0");
}

#[test]
fn metrics_are_served_at_a_unix_socket() {
    let bed = bed();
    let socket = bed.file("metrics.socket");
    let mut exporter = bed.own_command(Side::Server);
    exporter.args(["metrics", "--unix"]).arg(&socket);
    let _exporter = Background::start(&mut exporter).expect("the exporter starts");
    let mut page = String::new();
    let is_served = eventually(Duration::from_secs(10), || {
        let mut curl = Command::new("curl");
        curl.args(["-sf", "--unix-socket"]).arg(&socket);
        page = run(curl.arg("http://localhost/metrics")).unwrap_or_default();
        !page.is_empty()
    });
    assert!(is_served);
    assert!(page.contains("\nportolan_up{} 1"), "{page}");
    assert_eq!(page.trim_end().lines().last(), Some("# EOF"));
}

#[test]
fn the_rules_are_sound() {
    for arguments in [
        ["check", "rules", "portolan.rules.yml"],
        ["test", "rules", "portolan.rules.test.yml"],
    ] {
        let mut command = Command::new("promtool");
        command.args(arguments).current_dir(contrib("prometheus"));
        run(&mut command).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Returns the words of a text that are names of metrics, without the suffixes of counters and histograms.
fn metrics(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("portolan_"))
        .map(|word| {
            let mut suffixes = ["_total", "_bucket", "_count"].iter();
            suffixes
                .find_map(|suffix| word.strip_suffix(suffix))
                .unwrap_or(word)
        })
        .collect()
}

#[test]
fn rules_and_dashboard_use_metrics_that_exist() {
    let bed = bed();
    let page = bed
        .portolan(Side::Server, &["metrics"])
        .expect("the server answers");
    let known: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    for path in ["prometheus/portolan.rules.yml", "grafana/portolan.json"] {
        let text = fs::read_to_string(contrib(path)).expect("it is there");
        let used = metrics(&text);
        assert!(used.len() > 5, "{used:?}");
        let unknown: Vec<_> = used.difference(&known).collect();
        assert!(unknown.is_empty(), "{path}: {unknown:?}");
    }
}
