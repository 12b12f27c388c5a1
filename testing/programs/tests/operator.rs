//! Commands of network operators: `portolan ss` with the options and filters of ss(8), `nstat`, `ps`, `why`, and JSON
//! for programs, all with live programs.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{connect, exchange};
use portolan_programs::{PYTHON, bed, compiled_extension, eventually, file};
use rustix::process::Signal;
use serde_json::Value;

const PORT: u16 = 7090;
const SCHEMA: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/reference/portolan.schema.json"
);

/// Listens, accepts as many connections as an argument states, and echoes.
const ECHO: &str = "import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=7)
held = [listener.accept()[0] for _ in range(int(sys.argv[3]))]
while held:
    for connection in held:
        connection.sendall(connection.recv(4096))";

fn serve(bed: &Bed, accepted: &str) -> Background {
    serve_on(bed, Stack::Portolan, accepted)
}

fn serve_on(bed: &Bed, stack: Stack, accepted: &str) -> Background {
    let endpoint = bed.endpoint(PORT);
    let words = [
        "-c",
        ECHO,
        &endpoint.ip().to_string(),
        &endpoint.port().to_string(),
        accepted,
    ];
    bed.serve(stack, PORT, PYTHON, &words)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn portolan(bed: &Bed, line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    bed.portolan(Side::Server, &words)
        .unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn rows(bed: &Bed, line: &str) -> Vec<String> {
    let said = portolan(bed, line);
    let rows = said
        .lines()
        .filter(|line| line.contains(&format!(":{PORT} ")));
    rows.map(str::to_owned).collect()
}

#[test]
fn ss_is_what_people_know_from_the_kernel() {
    let bed = bed();
    let server = serve(&bed, "1");
    let mut stream = connect(&bed, PORT);
    exchange(&mut stream, 2, 5000);
    let [local, peer] =
        [stream.peer_addr(), stream.local_addr()].map(|address| address.unwrap().to_string());
    let pid = server.pid();

    let listening = rows(&bed, "ss -tlnp");
    assert_eq!(listening.len(), 1, "{listening:?}");
    let fields: Vec<_> = listening[0].split_whitespace().collect();
    let process = format!("users:((\"python3\",pid={pid}))");
    assert_eq!(
        fields,
        ["tcp", "LISTEN", "0", "7", &local, "0.0.0.0:*", &process]
    );

    let all = rows(&bed, "ss -tanp");
    assert_eq!(all.len(), 2, "{all:?}");
    let established = || rows(&bed, "ss -tn state established");
    // The program publishes its figures from time to time: the last ones may be of before it read.
    let has_read = || established()[0].split_whitespace().nth(2) == Some("0");
    assert!(eventually(Duration::from_secs(10), has_read));
    let connected = established();
    let mut fields: Vec<_> = connected[0].split_whitespace().collect();
    // Unacknowledged bytes, which vary.
    let unacknowledged: Result<u32, _> = fields.remove(3).parse();
    assert!(unacknowledged.is_ok(), "{connected:?}");
    assert_eq!(fields, ["tcp", "ESTAB", "0", &local, &peer]);

    for (line, count) in [
        (format!("ss -tan sport = :{PORT}"), 2),
        (format!("ss -tan dst {peer}"), 1),
        (
            format!("ss -tan ( sport = :{PORT} or dport = :1 ) and not dst 0.0.0.0/0"),
            1,
        ),
        ("ss -tan dst 203.0.113.0/24".to_owned(), 0),
        ("ss -ua".to_owned(), 0),
        ("ss -x".to_owned(), 0),
        ("ss -ta6".to_owned(), 0),
    ] {
        assert_eq!(rows(&bed, &line).len(), count, "{line}");
    }

    let told = portolan(&bed, "ss -tnoiem state established");
    let figures = told.lines().nth(2).expect("a line below the session");
    assert!(!figures.contains("ssthresh"), "nothing was lost: {figures}");
    let cwnd = figures
        .split(" cwnd:")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    assert!(
        cwnd.is_some_and(|segments| (2..1000).contains(&segments)),
        "{figures}"
    );
    assert!(figures.contains(" skmem:(r0,w"), "{figures}");
    assert!(portolan(&bed, "ss -s").contains("(estab 1, "));
    assert!(!portolan(&bed, "ss -H").contains("Netid"));
}

#[test]
fn connections_that_nobody_accepts_show_as_the_listeners_backlog() {
    let bed = bed();
    let _server = serve(&bed, "3");
    let streams = [
        connect(&bed, PORT),
        connect(&bed, PORT),
        connect(&bed, PORT),
        connect(&bed, PORT),
        connect(&bed, PORT),
    ];
    let queued = || {
        let rows = rows(&bed, "ss -tln");
        rows[0]
            .split_whitespace()
            .skip(2)
            .take(2)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let limit = std::time::Duration::from_secs(5);
    assert!(
        eventually(limit, || queued() == ["2", "7"]),
        "{:?}",
        queued()
    );
    drop(streams);
}

/// Returns the rows that ss(8) of iproute2 shows about the port, split at blanks and sorted.
fn rows_of_iproute2(bed: &Bed, words: &[&str]) -> Vec<Vec<String>> {
    let port = format!(":{PORT}");
    let mut ss = bed.command(Side::Server, Stack::Kernel, "ss");
    let said = run(ss.args(words).args(["sport", "=", &port]));
    sorted_fields(&said.unwrap_or_else(|error| panic!("{error}")))
}

fn sorted_fields(said: &str) -> Vec<Vec<String>> {
    let split = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    let mut rows: Vec<Vec<String>> = said.lines().map(split).collect();
    rows.sort();
    rows
}

#[test]
fn the_kernels_sockets_have_the_columns_of_iproute2() {
    let bed = bed();
    let _server = serve_on(&bed, Stack::Kernel, "1");
    let streams = [
        connect(&bed, PORT),
        connect(&bed, PORT),
        connect(&bed, PORT),
        connect(&bed, PORT),
    ];
    let listener = || rows_of_iproute2(&bed, &["-Htln"]);
    let queued = |queue: &str| listener()[0][1..3] == [queue, "7"];
    let limit = Duration::from_secs(5);
    assert!(eventually(limit, || queued("3")), "{:?}", listener());

    // -u with -t makes ss(8) name the protocol, too.
    let own = portolan(&bed, &format!("ss --kernel -Htuan sport = :{PORT}"));
    let expected = rows_of_iproute2(&bed, &["-Htuan"]);
    assert_eq!(expected.len(), 5, "{expected:?}");
    assert_eq!(sorted_fields(&own), expected);

    let own = portolan(
        &bed,
        &format!("ss --kernel -HtinO state established sport = :{PORT}"),
    );
    for field in ["mss:", "cwnd:", "segs_in:"] {
        let words = ["-HtinO", "state", "established"];
        let of = |rows: Vec<Vec<String>>| {
            let mut found: Vec<_> = rows
                .concat()
                .into_iter()
                .filter(|word| word.starts_with(field))
                .collect();
            found.sort();
            found
        };
        let expected = of(rows_of_iproute2(&bed, &words));
        assert_eq!(expected.len(), streams.len());
        assert_eq!(of(sorted_fields(&own)), expected, "{own}");
    }
}

#[test]
fn the_kernels_reservation_names_the_program_whose_port_it_is() {
    let bed = bed();
    let server = serve(&bed, "1");
    let rows: Vec<_> = rows(&bed, "ss --kernel -tlnp");
    assert_eq!(rows.len(), 2, "{rows:?}");
    let owner = format!(
        "portolan:reservation users:((\"python3\",pid={}))",
        server.pid()
    );
    assert!(rows.iter().any(|row| row.ends_with(&owner)), "{rows:?}");
}

#[test]
fn what_keeps_a_program_from_portolan_is_told() {
    let bed = bed();
    let server = serve(&bed, "1");
    let _kernels = bed
        .serve(
            Stack::Kernel,
            PORT + 1,
            PYTHON,
            &[
                "-c",
                ECHO,
                &bed.server.address.to_string(),
                &(PORT + 1).to_string(),
                "1",
            ],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let listed = portolan(&bed, "ps");
    let own = listed
        .lines()
        .find(|line| line.starts_with(&server.pid().to_string()));
    let own = own.unwrap_or_else(|| panic!("{listed}"));
    let words: Vec<&str> = own.split_whitespace().collect();
    assert!(
        words.ends_with(&[
            "python3",
            "1",
            "0",
            "portolan,",
            "loads",
            "the",
            "socket",
            "proxy"
        ]),
        "{own}"
    );
    assert!(portolan(&bed, &format!("why {}", server.pid())).contains("loads the socket proxy"));
    assert!(portolan(&bed, "why /bin/busybox").contains("is statically linked"));
    assert!(portolan(&bed, "why su").contains("set-user-ID"));
    let said = bed
        .command(Side::Server, Stack::Portolan, "/bin/busybox")
        .arg("true")
        .output();
    let said = String::from_utf8_lossy(&said.expect("it runs").stderr).into_owned();
    assert!(
        said.contains("is statically linked; ") && said.contains("link it dynamically to glibc"),
        "{said}"
    );
}

#[test]
fn nstat_counts_what_happened_since_the_last_call_by_the_kernels_names() {
    let bed = bed();
    let server = serve(&bed, "2");
    let history = bed.file("nstat");
    let nstat = |arguments: &[&str]| {
        let mut command = bed.own_command(Side::Server);
        let said = run(command
            .env("PORTOLAN_NSTAT_HISTORY", &history)
            .arg("nstat")
            .args(arguments));
        let said = said.unwrap_or_else(|error| panic!("{error}"));
        serde_json::from_str::<Value>(&said).expect("JSON")["portolan"]["TcpPassiveOpens"].as_u64()
    };
    let _first = connect(&bed, PORT);
    assert_eq!(nstat(&["--json"]), Some(1));
    assert_eq!(nstat(&["--json"]), None, "nothing happened");
    let _second = connect(&bed, PORT);
    assert_eq!(nstat(&["--json", "-s", "Tcp*"]), Some(1));
    assert_eq!(nstat(&["--json"]), Some(1));
    assert_eq!(nstat(&["--json", "-a"]), Some(2));
    drop(server);
}

/// Validates JSON against the schema of its command with Debian's python3-jsonschema.
fn validate(bed: &Bed, command: &str, said: &str) {
    const VALIDATE: &str = "import json, sys, jsonschema
schema = json.load(open(sys.argv[1]))
wanted = schema['properties'][sys.argv[2]]
def closed(part):
    if isinstance(part, dict):
        if 'properties' in part and 'oneOf' not in part:
            part.setdefault('additionalProperties', False)
        for inner in part.values(): closed(inner)
    if isinstance(part, list):
        for inner in part: closed(inner)
closed(schema['$defs'])
value = json.load(open(sys.argv[3]))
jsonschema.Draft202012Validator({'$defs': schema['$defs'], **wanted}).validate(value)";
    assert!(!said.contains("-0.0"), "{command}: {said}");
    let value = file(bed, "value.json", said);
    let mut python = Command::new("python3");
    python.args(["-c", VALIDATE, SCHEMA, command, &value]);
    run(&mut python).unwrap_or_else(|error| panic!("{command}: {error}\n{said}"));
}

#[test]
fn what_commands_print_as_json_is_what_the_schema_says() {
    let bed = bed();
    let _server = serve(&bed, "1");
    let mut stream = connect(&bed, PORT);
    exchange(&mut stream, 2, 5000);
    portolan(&bed, &format!("qos set port tcp:{PORT} rx --packets 10000"));
    portolan(&bed, "qos group create 7 --rate 50mbit");
    let extension = extension(&bed);
    let joins = format!(
        "qos group join 7 pid {} --rate 10mbit --json",
        std::process::id()
    );
    let checks = format!("ext check {extension} --json");
    for (command, line) in [
        ("ss", "ss -a --json"),
        ("ss", "--json ss -a --kernel"),
        ("ss --summary", "ss --kernel -s --json"),
        ("counters", "counters -a --json"),
        ("counters", "counters -p --json"),
        ("status", "status --json"),
        ("nstat", "nstat -s -a -z --json"),
        ("ps", "ps -a --json"),
        ("qos group join", &joins),
        ("qos show", "qos show --json"),
        ("top", "top --json -n 1 -d 0.2"),
        ("ext check", &checks),
        ("ext list", "ext list --json"),
        ("ext stats", "ext stats --json"),
        ("doctor", "doctor --json"),
    ] {
        validate(&bed, command, &portolan(&bed, line));
    }
}

#[test]
fn what_runs_until_it_is_ended_prints_lines_of_the_schemas_json() {
    let bed = bed();
    portolan(&bed, &format!("qos set port tcp:{PORT} rx --packets 10000"));
    let extension = extension(&bed);
    for (command, words) in [
        ("qos watch", vec!["qos", "watch", "1", "--json"]),
        (
            "ext install",
            vec!["ext", "install", &extension, "--udp", "7091", "--json"],
        ),
    ] {
        let mut program = bed.own_command(Side::Server);
        let mut program = Background::start_with_output(program.args(words).stdout(Stdio::piped()))
            .expect("it starts");
        let mut line = String::new();
        let output = program.output().expect("it is piped");
        BufReader::new(output)
            .read_line(&mut line)
            .expect("it prints");
        validate(&bed, command, &line);
    }
}

fn extension(bed: &Bed) -> String {
    let text = include_str!("../../../docs/examples/extensions/values.c");
    let object = compiled_extension(bed, "values", text);
    object.display().to_string()
}

/// Returns the congestion control of a newly opened socket.
fn congestion(bed: &Bed) -> String {
    const SCRIPT: &str = "import socket; s = socket.socket(); \
                          print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())";
    let mut program = bed.command(Side::Server, Stack::Portolan, PYTHON);
    let said = run(program.args(["-c", SCRIPT])).expect("python");
    said.trim().to_owned()
}

#[test]
fn a_changed_configuration_is_taken_up_as_a_whole_or_refused() {
    let mut bed = bed();
    let file = bed.file("server.toml");
    let before = fs::read_to_string(&file).expect("the server has it");
    let set = |lines: &str| fs::write(&file, format!("{lines}\n{before}")).expect("it is ours");
    let reload = |bed: &Bed| bed.portolan(Side::Server, &["reload"]);
    assert_eq!(
        reload(&bed).expect("root asks").trim(),
        "nothing has changed"
    );
    set("congestion = \"bbr\"\n");
    assert_eq!(
        reload(&bed).expect("it may change").trim(),
        "changed: congestion"
    );
    assert_eq!(congestion(&bed), "bbr");

    set("congestion = \"reno\"\nring_size = 1048576\n");
    let refused = reload(&bed).expect_err("it may not").to_string();
    assert!(
        refused.contains("`ring_size` takes a restart: channels"),
        "{refused}"
    );
    set("congestion = \"vegas\"\n");
    let refused = reload(&bed).expect_err("there is none").to_string();
    assert!(refused.contains("\"vegas\" is unknown"), "{refused}");
    set("socket_group = \"nosuchgroup\"\n");
    let refused = reload(&bed).expect_err("there is none").to_string();
    assert!(refused.contains("no group is named"), "{refused}");
    assert_eq!(congestion(&bed), "bbr", "the one before stays");

    set("congestion = \"reno\"\n");
    let daemon = bed.daemon(Side::Server).as_ref().expect("it runs");
    daemon.signal(Signal::HUP).expect("it runs");
    assert!(eventually(Duration::from_secs(10), || congestion(&bed) == "reno"));
    assert!(bed.daemon_log(Side::Server).contains("reloaded"));

    // As editors do: replaces the file by another one.
    let other = bed.file("other.toml");
    fs::write(&other, format!("congestion = \"cubic\"\n{before}")).expect("it is ours");
    fs::rename(&other, &file).expect("the same folder");
    assert_eq!(
        reload(&bed).expect("it may change").trim(),
        "changed: congestion"
    );
    assert_eq!(congestion(&bed), "cubic");

    let mut stranger = bed.command(Side::Server, Stack::Kernel, "setpriv");
    stranger.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    let programs = portolan_programs::public_programs(&bed);
    stranger.arg(programs.join("portolan"));
    let refused = run(stranger.args(["reload", "--config", "/dev/null"]));
    let refused = refused.expect_err("it is not root's").to_string();
    assert!(refused.contains("not permitted"), "{refused}");
}

/// Runs a `portoland` that must refuse to start, and returns its exit status and its output.
fn refused_server(bed: &Bed, arguments: &[&str]) -> (Option<i32>, String) {
    let mut server = Command::new("nsenter");
    server.arg(format!("--net={}", bed.namespace(Side::Server).path()));
    server.arg(&bed.tools().portoland).args(arguments);
    let output = server.output().expect("nsenter");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

#[test]
fn a_network_namespace_has_one_server_whatever_its_socket() {
    let mut bed = bed();
    let other = bed.file("another/control").display().to_string();
    let arguments = ["--interface", "eth0", "--socket", &other];
    let (code, said) = refused_server(&bed, &arguments);
    let daemon = bed.daemon(Side::Server).as_ref().expect("it runs").pid();
    assert_eq!(code, Some(3), "{said}");
    assert!(
        said.contains(&format!(
            "runs already in this network namespace (pid {daemon})"
        )),
        "{said}"
    );
    assert!(portolan(&bed, "status").contains("interfaces  eth0"));
}

#[test]
fn a_check_finds_what_a_start_would() {
    let bed = bed();
    for (arguments, expected) in [
        (&["--interface", "eth0"][..], ""),
        (&["--interface", "nosuch"], "cannot ask about device nosuch"),
        (&["--interface", "lo"], "device lo is not Ethernet"),
    ] {
        let (code, said) = refused_server(&bed, &[&["--check"], arguments].concat());
        let is_sound = expected.is_empty();
        assert_eq!(
            code,
            Some(if is_sound { 0 } else { 2 }),
            "{arguments:?}: {said}"
        );
        assert!(said.contains(expected), "{said}");
    }
    let file = portolan_programs::file(
        &bed,
        "group.toml",
        "interfaces = ['eth0']\nsocket_group = 'nosuch'\n",
    );
    let (code, said) = refused_server(&bed, &["--check", "--config", &file]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("no group is named \"nosuch\""), "{said}");
}

#[test]
fn what_the_server_has_lost_shows_in_its_status() {
    let bed = bed();
    assert!(!portolan(&bed, "status").contains("fault"));
    let namespace = bed.namespace(Side::Server);
    let links = namespace.enter(|| fs::read_to_string("/proc/thread-self/net/dev").expect("proc"));
    let own = links.lines().find_map(|line| {
        let name = line.split(':').next()?.trim();
        name.starts_with("ptl-srv").then(|| name.to_owned())
    });
    let own = own.expect("the server has it");
    namespace.ip(&format!("link del {own}"));
    let fault = || {
        let status = bed.portolan(Side::Server, &["status"]);
        status.err().map(|error| error.to_string())
    };
    assert!(eventually(Duration::from_secs(10), || fault().is_some()));
    let said = fault().expect("it stays");
    assert!(said.contains("exit status: 1"), "{said}");
    let mut status = bed.own_command(Side::Server);
    let status = status.arg("status").output().expect("it runs");
    let said = String::from_utf8_lossy(&status.stdout);
    assert!(
        said.contains("fault       the device by which the server answers was deleted"),
        "{said}"
    );
    let mut doctor = bed.own_command(Side::Server);
    let doctor = doctor.arg("doctor").output().expect("it runs");
    assert_eq!(doctor.status.code(), Some(1));
    let said = String::from_utf8_lossy(&doctor.stdout);
    assert!(said.contains("server answers was deleted"), "{said}");
}

/// A terminal, by tmux, in which a shell runs `portolan top` on the server host, and shows the terminal's mode after it.
struct Terminal {
    /// Of this tmux server.
    name: String,
}

impl Terminal {
    const LIMIT: Duration = Duration::from_secs(10);

    fn start(bed: &Bed, name: &str, environment: &str, arguments: &str) -> Terminal {
        let name = format!("portolan-{name}-{}", std::process::id());
        let portolan = bed.tools().portolan.display();
        let line = format!(
            "{environment} {portolan} top -d 0.2 {arguments}; echo ended $?; stty -a; exec cat"
        );
        let mut command = bed.command(Side::Server, Stack::Kernel, "tmux");
        command.args(["-L", &name, "-u", "-f", "/dev/null"]);
        command.args(["new-session", "-d", "-x", "80", "-y", "24", &line]);
        run(&mut command).unwrap_or_else(|error| panic!("{error}"));
        Terminal { name }
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("tmux");
        command.args(["-L", &self.name]).args(arguments);
        run(&mut command).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
    }

    fn press(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    fn resize(&self, columns: &str, rows: &str) {
        self.tmux(&["resize-window", "-x", columns, "-y", rows]);
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits for a screen, and returns it.
    fn await_screen(&self, is_expected: impl Fn(&str) -> bool) -> String {
        let mut screen = String::new();
        let found = eventually(Terminal::LIMIT, || {
            screen = self.screen();
            is_expected(&screen)
        });
        assert!(found, "{screen}");
        screen
    }

    fn await_text(&self, text: &str) -> String {
        self.await_screen(|screen| screen.contains(text))
    }

    /// Waits for the shell's report of the exit status, and checks that the terminal is in its former mode.
    fn await_end(&self, status: &str) {
        let screen = self.await_screen(|screen| {
            screen.contains(&format!("ended {status}")) && screen.contains("icanon")
        });
        for mode in ["icanon", "echo", "isig", "opost"] {
            assert!(
                screen.split_whitespace().any(|word| word == mode),
                "{screen}"
            );
        }
        assert!(!screen.contains("Processes"), "{screen}");
        let cursor = self.tmux(&["display-message", "-p", "#{cursor_flag} #{alternate_on}"]);
        assert_eq!(cursor.trim(), "1 0");
    }

    /// The process of `portolan top`, a child of the shell.
    fn pid(&self) -> i32 {
        let shell = self.tmux(&["display-message", "-p", "#{pane_pid}"]);
        let shell = shell.trim();
        let children = fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"));
        let children = children.expect("the shell runs");
        let pid = children.split_whitespace().next().expect("it has a child");
        pid.parse().expect("a number")
    }

    fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid()).expect("not zero");
        rustix::process::kill_process(pid, signal).expect("it runs");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Fails if the server of tmux has ended.
        let _ = run(Command::new("tmux").args(["-L", &self.name, "kill-server"]));
    }
}

#[test]
fn top_has_keys_and_fits_a_terminal_of_any_width() {
    let bed = bed();
    let server = serve(&bed, "1");
    let mut stream = connect(&bed, PORT);
    exchange(&mut stream, 2, 5000);
    portolan(&bed, &format!("qos set port tcp:{PORT} rx --packets 10000"));
    let terminal = Terminal::start(&bed, "keys", "", "");
    let pid = server.pid().to_string();
    let screen = terminal.await_text(&pid);
    assert!(
        screen.contains("In bit/s") && screen.contains("python3"),
        "{screen}"
    );

    terminal.press(&["2"]);
    let screen = terminal.await_text("Holder");
    assert!(screen.contains(&bed.endpoint(PORT).to_string()), "{screen}");
    terminal.press(&["/", "n", "o", "s", "u", "c", "h", "Enter"]);
    terminal.await_screen(|screen| screen.contains("filter: nosuch ") && !screen.contains(&pid));
    terminal.press(&["Escape"]);
    terminal.await_text(&pid);
    terminal.press(&[">", ">", "r"]);
    terminal.await_text("Local^");
    terminal.press(&["p"]);
    terminal.await_text("PAUSED");
    terminal.press(&["p", "3"]);
    terminal.await_text("root");
    terminal.press(&["4"]);
    terminal.await_text("eth0");
    terminal.press(&["5"]);
    let screen = terminal.await_text(&format!("port tcp:{PORT}"));
    assert!(screen.contains("0%]"), "{screen}");

    terminal.press(&["2"]);
    terminal.resize("40", "10");
    let screen = terminal.await_screen(|screen| {
        screen.contains("Local") && !screen.contains("Holder") && screen.contains("q quit")
    });
    assert!(screen.lines().count() <= 10, "{screen}");
    assert!(
        screen.lines().all(|line| line.chars().count() <= 40),
        "{screen}"
    );
    assert!(screen.contains("Out bit/s"), "{screen}");
    terminal.resize("200", "30");
    terminal.await_screen(|screen| screen.contains("Netid") && screen.contains("Retrans/s"));
    terminal.press(&["h"]);
    terminal.await_text("Any key leaves this help.");
    terminal.press(&["x", "q"]);
    terminal.await_end("0");
}

#[test]
fn top_restores_the_terminal_whatever_ends_or_stops_it() {
    let mut bed = bed();
    {
        let terminal = Terminal::start(&bed, "term", "", "");
        terminal.await_text("In bit/s");
        terminal.signal(Signal::TERM);
        terminal.await_end("143");
    }
    {
        let terminal = Terminal::start(&bed, "count", "", "-n 2");
        terminal.await_end("0");
    }
    {
        let terminal = Terminal::start(&bed, "stop", "", "");
        terminal.await_text("In bit/s");
        terminal.press(&["C-z"]);
        let state = || fs::read_to_string(format!("/proc/{}/stat", terminal.pid()));
        let is_stopped = || state().is_ok_and(|stat| stat.contains(") T "));
        assert!(eventually(Terminal::LIMIT, is_stopped));
        let screen = terminal.screen();
        assert!(!screen.contains("In bit/s"), "{screen}");
        terminal.signal(Signal::CONT);
        terminal.await_text("In bit/s");
        terminal.press(&["C-c"]);
        terminal.await_end("0");
    }
    drop(bed.daemon(Side::Server).take());
    let terminal = Terminal::start(&bed, "server", "", "");
    terminal.await_end("3");
}

#[test]
fn top_waits_for_a_server_that_restarts() {
    let mut bed = bed();
    let terminal = Terminal::start(&bed, "restart", "", "");
    terminal.await_text("In bit/s");
    drop(bed.daemon(Side::Server).take());
    let screen = terminal.await_text("/control: ");
    assert!(screen.contains("In bit/s"), "{screen}");
    bed.start_daemon(Side::Server).expect("it starts");
    terminal.await_text("0 sessions");
    terminal.press(&["q"]);
    terminal.await_end("0");
}

#[test]
fn top_colours_unless_told_not_to_and_prints_lines_where_there_is_no_terminal() {
    let bed = bed();
    let _server = serve(&bed, "1");
    portolan(&bed, &format!("qos set port tcp:{PORT} rx --packets 10000"));
    let has_colour = |terminal: &Terminal| {
        terminal.await_text("0%]");
        let screen = terminal.tmux(&["capture-pane", "-p", "-e"]);
        screen.contains("\x1b[38;5;2m")
    };
    let view = "--view guarantees";
    assert!(has_colour(&Terminal::start(&bed, "colour", "", view)));
    let plain = Terminal::start(&bed, "plain", "NO_COLOR=1", view);
    assert!(!has_colour(&plain));

    let said = portolan(&bed, "top -n 2 -d 0.1 --view users -o sessions");
    assert_eq!(said.matches("User ").count(), 2, "{said}");
    assert!(!said.contains('\x1b') && !said.contains("Netid"), "{said}");
    let mut unknown = bed.own_command(Side::Server);
    let refused = unknown.args(["top", "-b", "-o", "colour"]).output();
    let refused = refused.expect("it runs");
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("PID, Program"), "{said}");
}
