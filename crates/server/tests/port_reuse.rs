//! A port is free when `close` returns. Alone in its program: a child forked by another test holds
//! copies of all descriptors until its exec, and thereby the port.

mod common;

use common::{Library, control_path, start_server};
use portolan_netns::Bed;

#[test]
fn a_closed_listener_leaves_its_port_at_once() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    for _ in 0..50 {
        let (_, _, listener) = library.listen((Bed::A4, 8080).into(), 5);
        drop(listener);
    }
}
