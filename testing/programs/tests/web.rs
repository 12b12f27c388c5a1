//! Web servers and proxies of different architectures: Apache with a process per connection,
//! HAProxy as server and client at once, Node on libuv; and curl with many transfers.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::{STACKS, bed, client, each_pairing, eventually, file, serve};
use rustix::process::{Pid, Signal, kill_process};

const SOON: Duration = Duration::from_secs(10);
const CLOSE: &str = "Connection: close";

/// Longer than `wrk` runs: a late answer of a busy machine is not an error.
const TIMEOUT: &str = "20s";

/// Loads a server with sixteen connections for some seconds; every request must be answered properly.
fn load(bed: &Bed, stack: Stack, url: &str, (seconds, header): (u32, &str)) {
    let duration = format!("{seconds}s");
    let run = ["-t", "1", "-c", "16", "-d", &duration];
    let requests = ["--timeout", TIMEOUT, "-H", header, url];
    let arguments = [&run[..], &requests].concat();
    let report = client(bed, stack, "wrk", &arguments);
    assert!(report.contains("Requests/sec:"), "{report}");
    assert!(!report.contains("Socket errors"), "{header}: {report}");
    assert!(!report.contains("Non-2xx"), "{header}: {report}");
}

fn fetch(bed: &Bed, stack: Stack, arguments: &[&str]) -> String {
    let common = ["-sS", "--fail", "--max-time", "20"];
    client(bed, stack, "curl", &[&common[..], arguments].concat())
}

/// Returns pages in which no two blocks are alike, each a little longer than the previous one.
fn page(number: usize) -> String {
    let line = |n: usize| format!("{:016x}\n", (number * 7919 + n).wrapping_mul(0x9e37_79b9));
    (0..number * 53).map(line).collect()
}

/// Apache keeps as many idle processes as it needs, and a graceful restart lets each finish its
/// connection.
#[test]
fn apache_prefork_restarts_gracefully_under_load() {
    let bed = bed();
    let root = bed.file("www");
    fs::create_dir_all(&root).expect("the bed's directory is writable");
    fs::write(root.join("page"), page(1000)).expect("the bed's directory is writable");
    let pid_file = bed.file("apache.pid");
    let config = file(
        &bed,
        "apache.conf",
        format!(
            "ServerRoot {directory}\nServerName bed\nDefaultRuntimeDir {directory}\n\
             LoadModule mpm_prefork_module /usr/lib/apache2/modules/mod_mpm_prefork.so\n\
             LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so\n\
             PidFile {pid}\nErrorLog {directory}/apache.log\nListen {endpoint}\n\
             User www-data\nGroup www-data\nStartServers 8\nMinSpareServers 8\n\
             DocumentRoot {root}\n<Directory {root}>\nRequire all granted\n</Directory>\n",
            directory = root.parent().expect("a parent").display(),
            pid = pid_file.display(),
            endpoint = bed.endpoint(8081),
            root = root.display(),
        ),
    );
    // It kills its whole process group at its end.
    let mut words = bed.words(Stack::Portolan, "apache2");
    words.extend(["-f", &config, "-DFOREGROUND"].map(PathBuf::from));
    let words: Vec<&str> = words
        .iter()
        .map(|word| word.to_str().expect("UTF-8"))
        .collect();
    let _apache = serve(&bed, Stack::Kernel, 8081, "setsid", &words);
    let url = format!("http://{}/page", bed.endpoint(8081));
    for stack in STACKS {
        assert_eq!(fetch(&bed, stack, &[&url]), page(1000).trim_end());
        load(&bed, stack, &url, (1, CLOSE));
        std::thread::scope(|scope| {
            let load = scope.spawn(|| load(&bed, stack, &url, (3, CLOSE)));
            for _ in 0..2 {
                std::thread::sleep(Duration::from_secs(1));
                signal(&pid_file, Signal::USR1);
            }
            load.join().expect("no request fails");
        });
        let is_gone = || {
            let sessions = bed.portolan(Side::Server, &["ss"]);
            !sessions.expect("the server answers").contains("ESTAB")
        };
        let gone = eventually(SOON, is_gone);
        assert!(gone, "{:?}", bed.portolan(Side::Server, &["ss"]));
    }
}

fn signal(pid_file: &Path, signal: Signal) {
    let pid = fs::read_to_string(pid_file).expect("a process number");
    let pid = Pid::from_raw(pid.trim().parse().expect("a number")).expect("a process");
    kill_process(pid, signal).expect("it runs");
}

/// Starts two servers of one page each on the client host.
fn backends(bed: &Bed, stack: Stack) -> Background {
    let address = bed.client.address;
    let server = |port: u16| {
        format!(
            "server {{ listen {address}:{port}; location /who {{ return 200 \"{port}\\n\"; }}\n\
             location / {{ client_max_body_size 0; root {}; }} }}\n",
            bed.file("www").display()
        )
    };
    let config = file(
        bed,
        "backends.conf",
        format!(
            "user root; daemon off; worker_processes 2; pid {}; error_log stderr crit;\n\
             events {{}}\nhttp {{ access_log off; {} {} }}\n",
            bed.file("backends.pid").display(),
            server(8001),
            server(8002),
        ),
    );
    let mut nginx = bed.command(Side::Client, stack, "nginx");
    let nginx = Background::start(nginx.args(["-c", &config])).expect("nginx");
    let answers = || {
        let mut curl = bed.command(Side::Client, Stack::Kernel, "curl");
        run(curl.args(["-sS", &format!("http://{address}:8002/who")])).is_ok()
    };
    assert!(eventually(SOON, answers));
    nginx
}

fn haproxy_config(bed: &Bed) -> String {
    let backend = bed.client.address;
    file(
        bed,
        "haproxy.cfg",
        format!(
            "global\n  maxconn 1000\n  stats socket {} level admin expose-fd listeners\n\
             defaults\n  mode http\n  timeout connect 5s\n  timeout client 20s\n  timeout server 20s\nfrontend in\n  bind {}\n  \
             default_backend pages\nbackend pages\n  balance roundrobin\n  \
             server one {backend}:8001 check inter 200\n  \
             server two {backend}:8002 check inter 200\n",
            bed.file("haproxy.socket").display(),
            bed.endpoint(8080)
        ),
    )
}

/// The new worker gets the listeners from the old one, by messages with descriptors.
#[test]
fn haproxy_stands_before_nginx_and_is_reloaded_without_a_failed_request() {
    let bed = bed();
    fs::create_dir_all(bed.file("www")).expect("the bed's directory is writable");
    fs::write(bed.file("www").join("page"), page(3000)).expect("the same");
    let url = |path: &str| format!("http://{}/{path}", bed.endpoint(8080));
    for stack in STACKS {
        let _backends = backends(&bed, stack);
        let config = haproxy_config(&bed);
        let options = ["-W", "-f", &config];
        let haproxy = serve(&bed, Stack::Portolan, 8080, "haproxy", &options);
        let who = fetch(&bed, stack, &[&url("who?[1-8]")]);
        for backend in ["8001", "8002"] {
            let answers = who.lines().filter(|line| *line == backend).count();
            assert_eq!(answers, 4, "{who}");
        }
        let got = fetch(&bed, stack, &[&url("page")]);
        assert!(got == page(3000).trim_end(), "{} bytes", got.len());
        load(&bed, stack, &url("who"), (1, "Connection: keep-alive"));
        std::thread::scope(|scope| {
            let load = || load(&bed, stack, &url("who"), (3, CLOSE));
            let load = scope.spawn(load);
            for _ in 0..2 {
                std::thread::sleep(Duration::from_secs(1));
                haproxy.signal(Signal::USR2).expect("it runs");
            }
            load.join().expect("no request fails");
        });
        let got = fetch(&bed, stack, &[&url("page")]);
        assert!(got == page(3000).trim_end(), "{} bytes", got.len());
    }
}

#[test]
fn node_serves_pages_and_gives_back_what_it_gets() {
    let bed = bed();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/pages.js");
    let address = bed.server.address.to_string();
    let _node = serve(
        &bed,
        Stack::Portolan,
        8082,
        "node",
        &[script, &address, "8082"],
    );
    let sent = page(2000);
    let path = file(&bed, "sent", &sent);
    let url = |path: &str| format!("http://{}/{path}", bed.endpoint(8082));
    for stack in STACKS {
        let got = fetch(&bed, stack, &[&url("1600000")]);
        assert!(
            got == "0123456789abcdef".repeat(100_000),
            "{} bytes",
            got.len()
        );
        let data = format!("@{path}");
        let got = fetch(&bed, stack, &["--data-binary", &data, &url("")]);
        assert!(got == sent.trim_end(), "{} bytes", got.len());
        for header in ["Connection: keep-alive", "Connection: close"] {
            load(&bed, stack, &url("160"), (1, header));
        }
    }
}

/// The primary accepts, and sends each connection to a worker; a killed worker is replaced.
#[test]
fn nodes_cluster_serves_by_its_workers() {
    const WORKERS: usize = 3;
    let bed = bed();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/cluster.js");
    let (address, workers) = (bed.server.address.to_string(), WORKERS.to_string());
    let arguments = [script, &address, "8084", &workers];
    let _node = serve(&bed, Stack::Portolan, 8084, "node", &arguments);
    let url = |path: &str| format!("http://{}/{path}", bed.endpoint(8084));
    let workers = |stack| -> BTreeSet<String> {
        let said = fetch(&bed, stack, &["-H", CLOSE, &url("?[1-30]")]);
        assert_eq!(said.lines().count(), 30, "{said}");
        said.lines().map(str::to_owned).collect()
    };
    for stack in STACKS {
        let mut before = BTreeSet::new();
        assert!(eventually(SOON, || {
            before = workers(stack);
            before.len() == WORKERS
        }));
        for header in ["Connection: keep-alive", CLOSE] {
            load(&bed, stack, &url(""), (1, header));
        }
        assert_eq!(workers(stack), before);
        let killed = before.pop_first().expect("a worker");
        kill(&killed);
        let all_serve = || {
            let now = workers(stack);
            now.len() == WORKERS && !now.contains(&killed) && before.is_subset(&now)
        };
        assert!(eventually(SOON, all_serve));
    }
}

/// Kills a process, and waits until its parent has reaped it.
fn kill(process: &str) {
    let number = process.parse().ok().and_then(Pid::from_raw);
    kill_process(number.expect("a process"), Signal::KILL).expect("it runs");
    let entry = Path::new("/proc").join(process);
    assert!(eventually(SOON, || !entry.exists()));
}

#[test]
fn curl_fetches_two_hundred_pages_fifty_at_a_time() {
    const PAGES: usize = 200;
    let bed = bed();
    let root = bed.file("www");
    fs::create_dir_all(&root).expect("the bed's directory is writable");
    for number in 1..=PAGES {
        fs::write(root.join(number.to_string()), page(number)).expect("the same");
    }
    each_pairing(&bed, |bed, pairing| {
        let config = file(
            bed,
            "nginx.conf",
            format!(
                "user root; daemon off; worker_processes 2; pid {}; error_log stderr crit;\n\
                 events {{}}\nhttp {{ access_log off; server {{ listen {}; root {}; }} }}\n",
                bed.file("nginx.pid").display(),
                bed.endpoint(8083),
                root.display(),
            ),
        );
        let _nginx = serve(bed, pairing.server, 8083, "nginx", &["-c", &config]);
        let url = format!("http://{}/[1-{PAGES}]", bed.endpoint(8083));
        let got = bed.file("got");
        let output = got.join("#1").display().to_string();
        let parallel = ["--parallel", "--parallel-immediate", "--parallel-max", "50"];
        let into = ["--create-dirs", "-o", &output, &url];
        fetch(bed, pairing.client, &[&parallel[..], &into].concat());
        for number in 1..=PAGES {
            let text = fs::read_to_string(got.join(number.to_string())).expect("it was fetched");
            assert!(text == page(number), "page {number} differs");
        }
        fs::remove_dir_all(got).expect("it is ours");
    });
}
