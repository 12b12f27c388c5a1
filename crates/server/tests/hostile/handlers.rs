//! Handlers made of single instructions, and a process that owns some: for tests of what may be installed, and of its
//! effects.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::extension::{
    Code, Event, Extension, ExtensionReply, ExtensionReport, ExtensionRequest, Guard,
    MapDefinition, MapKind,
};
use portolan_proto::qos::Refusal;
use portolan_types::{Protocol, SessionId, Slot};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::common::{Client, Library, Near};
use crate::{counter, hostile_library};

pub(crate) const PASS: i32 = 0;
pub(crate) const CONSUME: i32 = 1;
pub(crate) const REPLY: i32 = 2;
pub(crate) const DELIVER: i32 = 3;
pub(crate) const FORWARD: i32 = 4;

/// Offsets in the view.
pub(crate) const LENGTH: i16 = 72;
pub(crate) const TO: i16 = 80;
pub(crate) const TO_PORT: i16 = 96;
pub(crate) const FROM_PORT: i16 = 98;
pub(crate) const PAYLOAD: i16 = 104;
pub(crate) const VIEW: i16 = PAYLOAD + 512;

/// Encodes an instruction: opcode, destination, source, offset, immediate.
pub(crate) fn op(opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> u64 {
    u64::from(opcode)
        | u64::from(source << 4 | destination) << 8
        | u64::from(offset as u16) << 16
        | u64::from(immediate as u32) << 32
}

pub(crate) fn mov(register: u8, value: i32) -> u64 {
    op(0xb7, register, 0, 0, value)
}

pub(crate) fn exit() -> u64 {
    op(0x95, 0, 0, 0, 0)
}

pub(crate) fn call(helper: i32) -> u64 {
    op(0x85, 0, 0, 0, helper)
}

/// Returns a handler that always returns the same verdict.
pub(crate) fn always(verdict: i32) -> Code {
    code([mov(0, verdict), exit()])
}

pub(crate) fn code(instructions: impl IntoIterator<Item = u64>) -> Code {
    Code {
        instructions: instructions.into_iter().collect(),
        ..Code::default()
    }
}

/// Returns a handler that reads the clock hundreds of times, which takes microseconds.
pub(crate) fn slow() -> Code {
    let looks = std::iter::repeat_n(call(5), 1000);
    code(looks.chain([mov(0, REPLY), exit()]))
}

pub(crate) fn map(kind: MapKind, key: u32, value: u32, entries: u32) -> MapDefinition {
    MapDefinition {
        name: "map".to_owned(),
        kind,
        key,
        value,
        entries,
        contents: Vec::new(),
        is_constant: false,
    }
}

/// A process with a port of its own.
pub(crate) struct Owner {
    pub library: Library,
    pub session: SessionId,
    pub port: SocketAddr,
    _near: Near,
}

impl Owner {
    pub(crate) fn start(path: &Path) -> Owner {
        Owner::of(hostile_library(path), SocketAddr::new(Bed::A4, 0))
    }

    pub(crate) fn of(mut library: Library, local: SocketAddr) -> Owner {
        let (reply, near) = library.bind(Protocol::Udp, local, Slot(1));
        let ReplyBody::Bound { session, local, .. } = reply else {
            panic!("{reply:?}");
        };
        Owner {
            library,
            session,
            port: local,
            _near: near,
        }
    }

    pub(crate) fn ask(&mut self, request: ExtensionRequest) -> ExtensionReply {
        ask(&mut self.library.client, request)
    }

    pub(crate) fn spec(&self, code: Code) -> Extension {
        Extension {
            name: "test".to_owned(),
            event: Event::of(Protocol::Udp, code.direction),
            guards: vec![Guard::Session(self.session)],
            priority: 128,
            code,
        }
    }

    pub(crate) fn install(&mut self, code: Code) -> u16 {
        self.install_at(128, code)
    }

    pub(crate) fn install_at(&mut self, priority: u8, code: Code) -> u16 {
        let spec = Extension {
            priority,
            ..self.spec(code)
        };
        match self.ask(ExtensionRequest::Install(spec)) {
            ExtensionReply::Installed { number, .. } => number,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn refused(&mut self, code: Code) -> Refusal {
        let spec = self.spec(code);
        refusal(self.ask(ExtensionRequest::Install(spec)))
    }

    /// Returns how many frames the owner got.
    pub(crate) fn frames(&mut self) -> usize {
        let mut count = 0;
        while self.library.ring.next().is_some() {
            count += 1;
        }
        count
    }
}

pub(crate) fn ask(client: &mut Client, request: ExtensionRequest) -> ExtensionReply {
    match client.ask(RequestBody::Extension(request)) {
        ReplyBody::Extension(reply) => reply,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn refusal(reply: ExtensionReply) -> Refusal {
    match reply {
        ExtensionReply::Refused(refusal) => {
            assert!(!refusal.reason.is_empty() && refusal.reason.len() < 5000);
            assert_ne!(refusal.errno, 0);
            refusal
        }
        other => panic!("{other:?}"),
    }
}

pub(crate) fn list(client: &mut Client) -> Vec<ExtensionReport> {
    let request = RequestBody::Extension(ExtensionRequest::List);
    client.send(request, &[]);
    client.receive_list(|body| match body {
        ReplyBody::Extension(ExtensionReply::List(part)) => Some(part),
        _ => None,
    })
}

/// Makes the first processor handle what the calling thread sends; each processor counts a handler's overruns for
/// itself.
pub(crate) fn send_from_first_cpu() {
    let mut first = CpuSet::new();
    first.set(0);
    sched_setaffinity(None, &first).unwrap();
}

/// Returns a kernel socket on host `b`.
pub(crate) fn peer(bed: &Bed, near: SocketAddr) -> UdpSocket {
    let far = if near.is_ipv4() { Bed::B4 } else { Bed::B6 };
    let socket = bed
        .b
        .enter(|| UdpSocket::bind(SocketAddr::new(far, 0)))
        .unwrap();
    socket.connect(near).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    socket
}

pub(crate) fn answer(peer: &UdpSocket, question: &[u8]) -> Vec<u8> {
    peer.send(question).unwrap();
    let mut heard = [0; 2048];
    let length = peer.recv(&mut heard).expect("an answer");
    heard[..length].to_vec()
}

pub(crate) fn assert_silent(peer: &UdpSocket, question: &[u8]) {
    peer.set_read_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    peer.send(question).unwrap();
    let heard = peer.recv(&mut [0; 64]);
    assert!(heard.is_err(), "{heard:?}");
    peer.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
}

pub(crate) fn filter_counter(path: &Path, name: &str) -> u64 {
    counter(path, "extension", name)
}
