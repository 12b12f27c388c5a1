//! Programs started while a connection is in use, by a child that shares its parent's memory.

use portolan_bench::bed::{Side, Stack};
use portolan_programs::{PYTHON, bed, client, counter};

const CLIENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/started.py");
const PORT: u16 = 7031;

#[test]
fn a_connection_outlives_what_children_of_vfork_do_with_its_descriptor() {
    let bed = bed();
    let endpoint = bed.endpoint(PORT);
    let echo = [
        "-c",
        "import socket, sys\n\
         listener = socket.create_server((sys.argv[1], int(sys.argv[2])))\n\
         connection, _ = listener.accept()\n\
         while bytes := connection.recv(4096): connection.sendall(bytes)",
        &endpoint.ip().to_string(),
        &endpoint.port().to_string(),
    ];
    let _server = bed
        .serve(Stack::Kernel, PORT, PYTHON, &echo)
        .unwrap_or_else(|error| panic!("{error}"));
    let arguments = [CLIENT, echo[2], echo[3]];
    let said = client(&bed, Stack::Portolan, PYTHON, &arguments);
    assert_eq!(said, "well");
    let cached = counter(&bed, Side::Client, "server", "sessions_cached");
    assert_eq!(cached, 3, "and it came back from each child that used it");
}

#[test]
fn children_of_busy_threads_find_no_lock_held() {
    const FORKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/busy_forks.py");
    let bed = bed();
    let endpoint = bed.endpoint(7032);
    let echo = [
        "-c",
        "import socketserver, sys\n\
         class Echo(socketserver.BaseRequestHandler):\n\
         \x20   def handle(self):\n\
         \x20       while bytes := self.request.recv(4096): self.request.sendall(bytes)\n\
         address = (sys.argv[1], int(sys.argv[2]))\n\
         socketserver.ThreadingTCPServer(address, Echo).serve_forever()",
        &endpoint.ip().to_string(),
        &endpoint.port().to_string(),
    ];
    let _server = bed
        .serve(Stack::Kernel, endpoint.port(), PYTHON, &echo)
        .unwrap_or_else(|error| panic!("{error}"));
    let said = client(&bed, Stack::Portolan, PYTHON, &[FORKS, echo[2], echo[3]]);
    assert_eq!(said, "well");
}
