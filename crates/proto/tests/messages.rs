//! Messages from a hostile process: any bytes are refused or decode to something bounded, and
//! re-encode to the same bytes.

use bolero::TypeGenerator;
use portolan_proto::control::{
    Blob, DescriptorEvent, FastOpenMode, HandshakeOptions, Reply, Request, RequestBody, SessionRef,
    SocketOptionsBlob,
};
use portolan_proto::metastate::Metastate;
use portolan_proto::report::SessionReport;
use portolan_proto::{Malformed, decode, encode};
use portolan_types::{Protocol, SessionId, Slot};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes that a decoded message may allocate per byte received: more would be an amplifier.
const BLOW_UP: usize = 64;

fn round_trip<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    if let Ok(message) = decode::<T>(bytes) {
        let again = encode(&message);
        assert!(again.len() <= bytes.len().max(1) * BLOW_UP);
        let twice: T = decode(&again).expect("what was encoded decodes");
        assert_eq!(encode(&twice), again);
    }
}

#[test]
fn no_bytes_make_a_message_decoder_panic() {
    portolan_fuzz::check!(3000).for_each(|bytes| {
        round_trip::<Request>(bytes);
        round_trip::<Reply>(bytes);
        round_trip::<DescriptorEvent>(bytes);
        round_trip::<Metastate>(bytes);
        round_trip::<Vec<SessionReport>>(bytes);
    });
}

/// Requests of every length, and how they are damaged.
#[derive(Debug, TypeGenerator)]
struct Damaged {
    kind: u8,
    numbers: (u32, u64, u32),
    bytes: Vec<u8>,
    changes: Vec<(u16, u8)>,
    cut: Option<u16>,
}

impl Damaged {
    fn genuine(&self) -> Request {
        let (id, session, slot) = self.numbers;
        let (session, slot) = (SessionId(session), Slot(slot));
        let remote = "192.0.2.1:80".parse().expect("an address");
        let body = match self.kind % 8 {
            0 => RequestBody::Hello {
                version: slot.0,
                program: String::from_utf8_lossy(&self.bytes).into_owned(),
            },
            1 => RequestBody::Connect {
                session: SessionRef::Known(session),
                protocol: Protocol::Tcp,
                remote,
                slot,
                options: HandshakeOptions {
                    receive_buffer: Some(id),
                    ..HandshakeOptions::default()
                },
                early: FastOpenMode::Payload {
                    bytes: self.bytes.clone(),
                    cookieless: true,
                    waits: true,
                },
            },
            2 => RequestBody::Flush {
                session,
                capsule: Blob::Inline(self.bytes.clone()).into(),
                then: portolan_proto::control::AfterFlush::Relay(
                    portolan_proto::control::Reader::Sender,
                ),
                options_blob: SocketOptionsBlob::default(),
            },
            3 => RequestBody::MisdeliveredFrame {
                frame: self.bytes.clone(),
            },
            4 => RequestBody::Resolve {
                interface: slot.0,
                address: remote.ip(),
            },
            5 => RequestBody::Flush {
                session,
                capsule: Blob::Memfd { length: slot.0 }.into(),
                then: portolan_proto::control::AfterFlush::Close,
                options_blob: SocketOptionsBlob(self.bytes.clone()),
            },
            6 => RequestBody::Cache { session, slot },
            _ => RequestBody::Probe,
        };
        Request { id, body }
    }
}

#[test]
fn a_damaged_request_is_refused_or_bounded() {
    portolan_fuzz::check!(3000)
        .with_type::<Damaged>()
        .for_each(|damaged| {
            let mut bytes = encode(&damaged.genuine());
            round_trip::<Request>(&bytes);
            for &(at, value) in damaged.changes.iter().take(8) {
                let at = usize::from(at) % bytes.len();
                bytes[at] = value;
            }
            if let Some(cut) = damaged.cut {
                bytes.truncate(usize::from(cut) % (bytes.len() + 1));
            }
            round_trip::<Request>(&bytes);
        });
}

#[test]
fn bytes_after_a_message_are_refused() {
    let request = Request {
        id: 1,
        body: RequestBody::Probe,
    };
    let mut bytes = encode(&request);
    bytes.push(0);
    assert!(matches!(decode::<Request>(&bytes), Err(Malformed)));
}
