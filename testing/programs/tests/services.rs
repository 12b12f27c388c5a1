//! Unmodified services and their clients, with Portolan at either end and at both.

use std::fs;
use std::time::Duration;

use portolan_bench::bed::{Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{PYTHON, bed, client, eventually, file, over_both_families, serve};

const FILTERED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/filtered.py");

#[test]
fn redis_serves_fifty_clients_with_and_without_pipelining() {
    over_both_families(|bed, pairing| {
        let address = bed.server.address.to_string();
        let _redis = serve(
            bed,
            pairing.server,
            6379,
            "redis-server",
            &["--bind", &address, "--protected-mode", "no", "--save", ""],
        );
        let cli = |words: &[&str]| {
            client(
                bed,
                pairing.client,
                "redis-cli",
                &[&["-h", &address], words].concat(),
            )
        };
        let value = "v".repeat(100_000);
        assert_eq!(cli(&["SET", "key", &value]), "OK");
        assert_eq!(cli(&["GET", "key"]), value);
        for pipeline in ["1", "16"] {
            let csv = client(
                bed,
                pairing.client,
                "redis-benchmark",
                &[
                    "-h", &address, "-c", "50", "-n", "10000", "-t", "set,get", "--csv", "-P",
                    pipeline,
                ],
            );
            assert!(csv.contains("\"SET\"") && csv.contains("\"GET\""), "{csv}");
        }
    });
}

/// As the unit of Debian's redis, whose filter (`SystemCallFilter=~@resources`) kills for calls that redis does not make.
#[test]
fn redis_runs_under_a_filter_that_kills_for_unusual_system_calls() {
    let bed = bed();
    let address = bed.server.address.to_string();
    let redis = [
        "redis-server",
        "--bind",
        &address,
        "--protected-mode",
        "no",
        "--save",
        "",
    ];
    let words = [&[FILTERED], &redis[..]].concat();
    let mut server = serve(&bed, Stack::Portolan, 6379, PYTHON, &words);
    for _ in 0..3 {
        let cli = ["-h", &address, "PING"];
        assert_eq!(client(&bed, Stack::Portolan, "redis-cli", &cli), "PONG");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(server.is_running());
    let listeners = bed.portolan(Side::Server, &["ss", "-Htln", "sport", "=", ":6379"]);
    assert!(!listeners.expect("the server answers").is_empty());
}

#[test]
fn nginx_with_four_workers_serves_curl_and_wrk() {
    over_both_families(|bed, pairing| {
        let root = bed.file("www");
        fs::create_dir_all(&root).expect("the bed's directory is writable");
        let page = "0123456789".repeat(100_000);
        fs::write(root.join("page"), &page).expect("the bed's directory is writable");
        let config = file(
            bed,
            "nginx.conf",
            format!(
                "user root; daemon off; worker_processes 4; pid {}; error_log stderr crit;\n\
             events {{}}\n\
             http {{ access_log off; server {{ listen {}; root {}; }} }}\n",
                bed.file("nginx.pid").display(),
                bed.endpoint(8080),
                root.display(),
            ),
        );
        let _nginx = serve(bed, pairing.server, 8080, "nginx", &["-c", &config]);
        let url = format!("http://{}/page", bed.endpoint(8080));
        // Two URLs in one command: the second uses the kept connection.
        let twice = client(
            bed,
            pairing.client,
            "curl",
            &["-sS", "--max-time", "20", &url, &url],
        );
        assert_eq!(twice, page.repeat(2));
        for header in ["Connection: keep-alive", "Connection: close"] {
            let report = client(
                bed,
                pairing.client,
                "wrk",
                &["-t", "1", "-c", "16", "-d", "1s", "-H", header, &url],
            );
            assert!(report.contains("Requests/sec:"), "{report}");
            assert!(!report.contains("Socket errors"), "{header}: {report}");
            assert!(!report.contains("Non-2xx"), "{header}: {report}");
        }
    });
}

#[test]
fn iperf3_runs_both_ways_and_with_four_streams() {
    over_both_families(|bed, pairing| {
        let address = bed.server.address.to_string();
        for options in [&["-P", "1"][..], &["-R"], &["-P", "4"]] {
            // A persistent server would close its port between two runs.
            let _iperf = serve(
                bed,
                pairing.server,
                5201,
                "iperf3",
                &["-s", "-1", "-B", &address],
            );
            let arguments = [&["-c", &address, "-n", "64M", "-J"], options].concat();
            let json = client(bed, pairing.client, "iperf3", &arguments);
            let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
            let rate = report["end"]["sum_received"]["bits_per_second"].as_f64();
            assert!(rate.is_some_and(|rate| rate > 1e7), "{options:?}: {json}");
        }
    });
}

#[test]
fn memcached_returns_what_was_stored() {
    over_both_families(|bed, pairing| {
        let address = bed.server.address.to_string();
        let _memcached = serve(
            bed,
            pairing.server,
            11211,
            "memcached",
            &["-u", "root", "-l", &address, "-U", "0"],
        );
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/memcached.py");
        assert_eq!(
            client(bed, pairing.client, PYTHON, &[script, &address, "11211"]),
            "exact"
        );
    });
}

#[test]
fn pythons_http_server_answers_urllib() {
    over_both_families(|bed, pairing| {
        let directory = bed.file("python");
        fs::create_dir_all(&directory).expect("the bed's directory is writable");
        fs::write(directory.join("file"), "x".repeat(300_000)).expect("the same");
        let address = bed.server.address.to_string();
        let _server = serve(
            bed,
            pairing.server,
            8000,
            PYTHON,
            &[
                "-m",
                "http.server",
                "8000",
                "--bind",
                &address,
                "--directory",
                &directory.display().to_string(),
            ],
        );
        let program = format!(
            "import urllib.request; \
             print(len(urllib.request.urlopen('http://{}/file', timeout=20).read()))",
            bed.endpoint(8000)
        );
        assert_eq!(
            client(bed, pairing.client, PYTHON, &["-c", &program]),
            "300000"
        );
    });
}

#[test]
fn dig_gets_its_answer_over_udp() {
    over_both_families(|bed, pairing| {
        let address = bed.server.address.to_string();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/dns.py");
        let mut server = bed.command(Side::Server, pairing.server, PYTHON);
        let _server = Background::start(server.args([script, &address, "5353"])).expect("a server");
        let target = format!("@{address}");
        let mut answer = String::new();
        let answered = eventually(std::time::Duration::from_secs(10), || {
            let mut dig = bed.command(Side::Client, pairing.client, "dig");
            dig.args([
                &target,
                "-p",
                "5353",
                "+short",
                "+tries=1",
                "+time=1",
                "portolan.test",
            ]);
            answer = run(&mut dig).unwrap_or_else(|error| error.to_string());
            answer == "192.0.2.7"
        });
        assert!(answered, "{answer}");
    });
}
