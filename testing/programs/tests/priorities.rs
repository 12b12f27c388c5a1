//! `SO_PRIORITY` and `SO_MARK`: the user's filters and routes see them on packets that Portolan sends.

use std::process::Command;

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::run;
use portolan_netns::Bed as Wire;
use portolan_programs::{PYTHON, client, file, serve};

const PORT: u16 = 7_083;
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/priorities.py");

/// Echoes by stream and by datagram.
const ECHO: &str = "import socket, sys, threading
to = (sys.argv[1], int(sys.argv[2]))
def datagrams(s):
    while True:
        text, peer = s.recvfrom(2048)
        s.sendto(text, peer)
def stream(s):
    try:
        while text := s.recv(2048): s.sendall(text)
    except OSError: pass
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(to)
threading.Thread(target=datagrams, args=(s,), daemon=True).start()
listener = socket.create_server(to)
while True:
    threading.Thread(target=stream, args=(listener.accept()[0],), daemon=True).start()
";

/// A user's filter at egress, which drops frames of priorities 5 and 2. The context is that of linux/bpf.h.
const FILTER: &str = "struct frame { unsigned int before[8]; unsigned int priority; };
__attribute__((section(\"tc\"), used)) int drop(struct frame *frame) { return frame->priority == 5 || frame->priority == 2 ? 2 : -1; }
char _license[] __attribute__((section(\"license\"), used)) = \"GPL\";
";

fn in_client(bed: &Bed, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let mut command = bed.namespace(Side::Client).exec(words[0]);
    run(command.args(&words[1..])).unwrap_or_else(|error| panic!("{line}: {error}"));
}

fn drop_priority_five(bed: &Bed) {
    let source = file(bed, "five.c", FILTER);
    let object = bed.file("five.o");
    let compiled = Command::new("clang")
        .args(["-O2", "-target", "bpf", "-c", &source, "-o"])
        .arg(&object)
        .status();
    assert!(
        compiled.is_ok_and(|status| status.success()),
        "clang compiles it"
    );
    let object = object.display();
    in_client(
        bed,
        &format!("tc filter add dev {INTERFACE} egress bpf da obj {object} sec tc"),
    );
}

#[test]
fn filters_and_routes_of_the_users_see_what_a_program_chooses() {
    // The rule that shows marks must not make all sockets the kernel's.
    let mut bed = Bed::bare(Wire::veth()).expect("a bed");
    bed.set_settings("host_policy = \"ignore\"\n");
    bed.start_daemon(Side::Client).expect("a server");
    let endpoint = bed.endpoint(PORT);
    let (address, port) = (endpoint.ip().to_string(), PORT.to_string());
    let _echo = serve(
        &bed,
        Stack::Kernel,
        PORT,
        PYTHON,
        &["-c", ECHO, &address, &port],
    );
    drop_priority_five(&bed);
    in_client(&bed, "ip rule add fwmark 7 prohibit");
    let said = client(&bed, Stack::Portolan, PYTHON, &[SCRIPT, &address, &port]);
    assert_eq!(said.trim(), "all right");
}
