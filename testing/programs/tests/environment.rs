//! The environment of a program: its variables, its namespaces and capabilities, and other preloaded libraries.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{assert_ends_in_order, connect, exchange};
use portolan_programs::{
    PYTHON, STACKS, Steps, bed, client, compiled, compiled_library, counter, eventually, file,
    serve,
};

const ECHO: &str = "import socketserver, sys\n\
     class Echo(socketserver.BaseRequestHandler):\n\
     \x20   def handle(self):\n\
     \x20       while bytes := self.request.recv(4096): self.request.sendall(bytes)\n\
     socketserver.ThreadingTCPServer.allow_reuse_address = True\n\
     address = (sys.argv[1], int(sys.argv[2]))\n\
     socketserver.ThreadingTCPServer(address, Echo).serve_forever()";

const TIMEOUT: Duration = Duration::from_secs(20);

fn echo(bed: &Bed, stack: Stack, port: u16) -> Background {
    let address = bed.endpoint(port).ip().to_string();
    let arguments = ["-c", ECHO, &address, &port.to_string()];
    serve(bed, stack, port, PYTHON, &arguments)
}

fn opened(bed: &Bed, side: Side) -> u64 {
    counter(bed, side, "server", "active_opens")
}

/// Moves the control socket of a host's server to a path that must be passed explicitly.
fn hide_control(bed: &Bed, side: Side) -> PathBuf {
    let inode = bed.namespace(side).inode();
    let hidden = PathBuf::from(format!("/run/portolan/{inode}/hidden"));
    fs::rename(format!("/run/portolan/{inode}/control"), &hidden).expect("the server listens");
    hidden
}

fn show_control(hidden: &PathBuf) {
    fs::rename(hidden, hidden.with_file_name("control")).expect("it was there");
}

#[test]
fn what_was_asked_for_outlives_the_environment() {
    let bed = bed();
    let endpoint = bed.endpoint(7060);
    let _server = echo(&bed, Stack::Kernel, endpoint.port());
    let hidden = hide_control(&bed, Side::Client);
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/cleared.py");
    let mut command = bed.own_command(Side::Client);
    command.args(["run", "--require", "--socket"]).arg(&hidden);
    command.args(["--", PYTHON, fixture]);
    command.args([endpoint.ip().to_string(), endpoint.port().to_string()]);
    let said = run(&mut command).unwrap_or_else(|error| panic!("{error}"));
    show_control(&hidden);
    assert_eq!(said, "well");
    assert_eq!(opened(&bed, Side::Client), 1);
}

/// nginx keeps only `TZ` of its environment.
#[test]
fn nginx_clears_its_environment_and_serves() {
    let bed = bed();
    let hidden = hide_control(&bed, Side::Server);
    let config = file(
        &bed,
        "nginx.conf",
        format!(
            "daemon off;\nmaster_process on;\nworker_processes 2;\nuser root;\nenv TZ;\npid {};\nerror_log {};\n\
             events {{ worker_connections 64; }}\n\
             http {{ access_log off; server {{ listen {};\n location / {{ return 200 well; }} }} }}",
            bed.file("nginx.pid").display(),
            bed.file("nginx.log").display(),
            bed.endpoint(8090),
        ),
    );
    for start in 0..20 {
        let mut command = bed.own_command(Side::Server);
        command.args(["run", "--require", "--socket"]).arg(&hidden);
        command.args(["--", "nginx", "-c", &config]);
        let mut nginx = Background::start(&mut command).expect("nginx");
        let url = format!("http://{}/", bed.endpoint(8090));
        let fetch = [
            "-sS",
            "--retry",
            "40",
            "--retry-delay",
            "0",
            "--retry-connrefused",
        ];
        let fetch = [&fetch[..], &["--max-time", "10", &url]].concat();
        for _ in 0..4 {
            let said = client(&bed, Stack::Kernel, "curl", &fetch);
            assert_eq!(said, "well", "start {start}");
        }
        assert!(nginx.is_running());
    }
    let log = fs::read_to_string(bed.file("nginx.log")).expect("nginx logs");
    assert!(!log.contains("Network is down"), "{log}");
    show_control(&hidden);
    let served = counter(&bed, Side::Server, "server", "passive_opens");
    assert!(served >= 80, "{served} connections were Portolan's");
}

fn output(command: &mut Command) -> Output {
    command
        .stdin(Stdio::null())
        .output()
        .expect("`portolan` is there")
}

#[test]
fn a_program_that_requires_a_server_is_not_started_without_one() {
    let bed = Bed::bare(portolan_netns::Bed::veth()).expect("root");
    let mut by_option = bed.own_command(Side::Client);
    by_option.args(["run", "--require", "--", "echo", "started"]);
    let mut by_variable = bed.own_command(Side::Client);
    by_variable.args(["run", "--", "echo", "started"]);
    by_variable.env("PORTOLAN", "require");
    for command in [&mut by_option, &mut by_variable] {
        let Output {
            status,
            stdout,
            stderr,
        } = output(command);
        assert_eq!(status.code(), Some(125));
        assert!(stdout.is_empty());
        let said = String::from_utf8_lossy(&stderr);
        assert!(said.contains("no server listens"), "{said}");
    }
}

#[test]
fn variables_without_a_meaning_are_reported_once() {
    let bed = bed();
    let program = "import os, socket\n\
         socket.socket()\n\
         os.fork() or socket.socket()\n";
    for (name, value) in [
        ("PORTOLAN", "requrie"),
        ("PORTOLAN_SPIN", "fast"),
        ("PORTOLAN_DELIVERY", "pigeon"),
        ("PORTOLAN_DIRECT", "yes"),
        ("PORTOLAN_DELEGATE", "yes"),
    ] {
        let mut command = bed.own_command(Side::Client);
        command.args(["run", "--", PYTHON, "-c", program]);
        let said = output(command.env(name, value));
        assert!(said.status.success());
        let said = String::from_utf8_lossy(&said.stderr);
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains(&format!("{name}=\"{value}\"")), "{said}");
    }
}

/// Has a connection echoed in parts by a program that isolates itself in the given way.
fn isolates_itself(way: &str, parts: usize) {
    let bed = bed();
    let program = compiled(&bed, "testing/programs/fixtures/isolated.c");
    for (stack, port) in STACKS.into_iter().zip([7061, 7062]) {
        for turn in 0..20 {
            eprintln!("{stack:?}, {turn}");
            let endpoint = bed.endpoint(port);
            let mut command = bed.command(Side::Server, stack, &program);
            command.args([way, &endpoint.ip().to_string(), &port.to_string()]);
            command.stdout(Stdio::piped());
            let mut server = Background::start_with_output(&mut command).expect("it starts");
            let mut stream = connect(&bed, port);
            exchange(&mut stream, parts, 1000);
            assert!(server.wait(TIMEOUT), "it does not end");
            assert_eq!(server.finish().trim(), "done");
            assert_ends_in_order(stream);
        }
    }
}

#[test]
fn processes_that_no_handler_sees_forked_give_up_their_user() {
    isolates_itself("processes", 4);
}

/// As vsftpd does: the threads have the same numbers in their namespaces.
#[test]
fn processes_in_namespaces_of_process_numbers_give_up_their_user() {
    isolates_itself("pids", 5);
}

#[test]
fn processes_without_a_network_use_connections_that_they_inherit() {
    isolates_itself("networks", 4);
}

#[test]
fn a_child_of_clone_uses_a_connection_and_ends() {
    isolates_itself("library", 3);
}

#[test]
fn a_program_with_connections_unshares_its_users() {
    isolates_itself("unshare", 3);
}

#[test]
fn a_program_with_connections_enters_a_namespace_of_users() {
    isolates_itself("enter", 2);
}

#[test]
fn no_thread_keeps_capabilities_that_its_program_gives_up() {
    isolates_itself("capabilities", 2);
}

/// Serves and connects with a library preloaded before ours.
fn works_behind(source: &str, name: &str, options: &[&str]) {
    let bed = bed();
    let library = compiled_library(&bed, source, name, options);
    let ours = bed.tools().beside("libportolan_preload.so");
    let preload = format!("LD_PRELOAD={library}:{}", ours.display());
    let address = bed.endpoint(7063).ip().to_string();
    let with_both = [&preload, PYTHON, "-c"];
    let served = [&with_both[..], &[ECHO, &address, "7063"]].concat();
    let _server = serve(&bed, Stack::Portolan, 7063, "env", &served);
    let mut stream = connect(&bed, 7063);
    exchange(&mut stream, 8, 3000);
    assert_ends_in_order(stream);
    let talk = "import socket, sys\n\
         connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)\n\
         connection.sendall(b'well')\n\
         print(connection.recv(4).decode())";
    let asked = [&with_both[..], &[talk, &address, "7063"]].concat();
    assert_eq!(client(&bed, Stack::Portolan, "env", &asked), "well");
    assert!(opened(&bed, Side::Client) > 0, "it is Portolan's");
}

#[test]
fn a_program_uses_connections_while_it_ends() {
    const PORT: u16 = 7080;
    let bed = bed();
    let program = compiled(&bed, "testing/programs/fixtures/at_exit.c");
    let _server = echo(&bed, Stack::Kernel, PORT);
    let address = bed.server.address.to_string();
    for stack in STACKS {
        let mut command = bed.command(Side::Client, stack, &program);
        let told = run(command.args([&address, &PORT.to_string()]));
        let expected = "forks\nis answered\nis answered at last";
        assert_eq!(told.expect("it ends").trim(), expected, "{stack:?}");
    }
}

#[test]
fn another_library_passes_calls_on_to_this_one() {
    works_behind("testing/programs/fixtures/interposer.c", "passing", &[]);
}

#[test]
fn another_library_makes_calls_by_other_names() {
    works_behind("testing/programs/fixtures/rerouting.c", "renaming", &[]);
}

#[test]
fn another_library_makes_calls_by_number() {
    let source = "testing/programs/fixtures/rerouting.c";
    works_behind(source, "numbering", &["-DBY_NUMBER"]);
}

#[test]
fn a_program_registers_in_the_namespace_that_it_is_in() {
    let bed = bed();
    let port = 7064;
    let there = bed.endpoint(port).ip().to_string();
    let here = bed.client.address.to_string();
    let _there = echo(&bed, Stack::Kernel, port);
    let mut command = bed.command(Side::Client, Stack::Kernel, PYTHON);
    let _here = Background::start(command.args(["-c", ECHO, &here, &port.to_string()]));
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/namespaces.py");
    let mut command = bed.own_command(Side::Client);
    command.args(["run", "--", PYTHON, fixture]).args([
        bed.namespace(Side::Client).path(),
        bed.namespace(Side::Server).path(),
    ]);
    command.args([&here, &there, &port.to_string()]);
    let mut program = Steps::start(&mut command);
    for (step, at_home, away) in [
        ("at home", 1, 0),
        ("away", 1, 1),
        ("both", 1, 1),
        ("at home again", 2, 1),
        ("with a thread away", 3, 1),
    ] {
        program.await_line(step);
        let counts = || (opened(&bed, Side::Client), opened(&bed, Side::Server));
        assert!(
            eventually(TIMEOUT, || counts() == (at_home, away)),
            "{step}: {:?}",
            counts()
        );
        program.go_on();
    }
}
