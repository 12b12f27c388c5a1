//! Programs whose packages are too large for every test run: `make strangers` installs them and runs these tests and
//! those of `strangers`, with 20 starts each.

use std::fs;
use std::process::{Command, Stdio};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_bench::services::mariadb::{MariaDb, sysbench_options};
use portolan_programs::strangers::{address, each_start};
use portolan_programs::{PYTHON, file};

/// A broker, and the port mapper of Erlang nodes, which it starts and would leave behind.
struct Broker {
    server: Option<Background>,
    end_port_mapper: Command,
}

impl Drop for Broker {
    fn drop(&mut self) {
        drop(self.server.take());
        // Fails if the broker did not start the port mapper.
        let _ = run(&mut self.end_port_mapper);
    }
}

fn broker(bed: &Bed, stack: Stack, port: u16) -> Broker {
    let home = bed.file("rabbitmq");
    // Remove the files of the previous start.
    let _ = fs::remove_dir_all(&home);
    fs::create_dir_all(&home).expect("the bed's directory is writable");
    let config = file(bed, "rabbitmq/rabbitmq.conf", "loopback_users = none\n");
    let program = "/usr/lib/rabbitmq/bin/rabbitmq-server";
    let mut command = bed.command(Side::Server, stack, program);
    command
        .env("HOME", &home)
        .env("RABBITMQ_NODENAME", "rabbit@localhost")
        .env("RABBITMQ_NODE_IP_ADDRESS", address(bed))
        .env("RABBITMQ_NODE_PORT", port.to_string())
        .env("RABBITMQ_CONFIG_FILE", config)
        // Keep it from starting processes that would outlive it.
        .env("RABBITMQ_ALLOW_INPUT", "1")
        .env("RABBITMQ_SERVER_START_ARGS", "-noinput")
        .stdout(Stdio::null());
    for (variable, name) in [
        ("ENABLED_PLUGINS_FILE", "plugins"),
        ("MNESIA_BASE", "mnesia"),
        ("LOG_BASE", "log"),
        ("PID_FILE", "pid"),
    ] {
        command.env(format!("RABBITMQ_{variable}"), home.join(name));
    }
    let mut end_port_mapper = bed.command(Side::Server, stack, "epmd");
    end_port_mapper.arg("-kill");
    Broker {
        server: Some(started(bed, port, "rabbitmq-server", &mut command)),
        end_port_mapper,
    }
}

fn started(bed: &Bed, port: u16, program: &str, command: &mut Command) -> Background {
    let service = bed.serve_command(port, program, command);
    service.unwrap_or_else(|error| panic!("{error}"))
}

/// A node connects to itself by its port mapper; both have a dozen threads.
#[test]
fn rabbitmq_passes_4000_messages_on() {
    const PORT: u16 = 5672;
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/broker.py");
    let start = |bed: &Bed, stack: Stack| broker(bed, stack, PORT);
    each_start(start, |client| {
        let arguments = [SCRIPT, &address(client.bed), &PORT.to_string(), "4000"];
        assert_eq!(client.run(PYTHON, &arguments), "exact");
    });
}

/// One thread per connection, and one that waits for all of them.
#[test]
fn mariadb_serves_sysbench() {
    const PORT: u16 = 7196;
    let start = |bed: &Bed, stack: Stack| {
        let data = bed.file("mariadb");
        let _ = fs::remove_dir_all(&data);
        let server = MariaDb::new(data, PORT).and_then(|mariadb| mariadb.serve(bed, stack));
        server.unwrap_or_else(|error| panic!("{error}"))
    };
    each_start(start, |client| {
        let sysbench = |step: &str| {
            let connection = sysbench_options(client.bed, PORT);
            let load = [
                "--tables=2",
                "--table-size=1000",
                "--threads=16",
                "--time=3",
            ];
            let mut arguments = vec!["oltp_read_write"];
            arguments.extend(connection.iter().map(String::as_str));
            arguments.extend(load);
            arguments.push(step);
            client.run("sysbench", &arguments)
        };
        sysbench("prepare");
        let report = sysbench("run");
        let errors = report.lines().find(|line| line.contains("reconnects:"));
        assert!(errors.is_some_and(|line| line.contains(" 0 ")), "{report}");
    });
}
