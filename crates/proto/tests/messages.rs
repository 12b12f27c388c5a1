//! Messages from a hostile process: any octets are refused or decode to something bounded, and
//! what decodes is encoded as it came.

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

/// Octets that a decoded message may own for each one received: more would be an amplifier.
const BLOW_UP: usize = 64;

fn round_trip<T: Serialize + DeserializeOwned>(octets: &[u8]) {
    if let Ok(message) = decode::<T>(octets) {
        let again = encode(&message);
        assert!(again.len() <= octets.len().max(1) * BLOW_UP);
        let twice: T = decode(&again).expect("what was encoded decodes");
        assert_eq!(encode(&twice), again);
    }
}

#[test]
fn no_octets_make_a_message_decoder_panic() {
    portolan_fuzz::check!(3000).for_each(|octets| {
        round_trip::<Request>(octets);
        round_trip::<Reply>(octets);
        round_trip::<DescriptorEvent>(octets);
        round_trip::<Metastate>(octets);
        round_trip::<Vec<SessionReport>>(octets);
    });
}

/// Requests of every length, and what damages them.
#[derive(Debug, TypeGenerator)]
struct Damaged {
    kind: u8,
    numbers: (u32, u64, u32),
    octets: Vec<u8>,
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
                program: String::from_utf8_lossy(&self.octets).into_owned(),
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
                    octets: self.octets.clone(),
                    cookieless: true,
                    waits: true,
                },
            },
            2 => RequestBody::Flush {
                session,
                capsule: Blob::Inline(self.octets.clone()).into(),
                then: portolan_proto::control::AfterFlush::Relay(
                    portolan_proto::control::Reader::Sender,
                ),
                options_blob: SocketOptionsBlob::default(),
            },
            3 => RequestBody::MisdeliveredFrame {
                frame: self.octets.clone(),
            },
            4 => RequestBody::Resolve {
                interface: slot.0,
                address: remote.ip(),
            },
            5 => RequestBody::Flush {
                session,
                capsule: Blob::Memfd { length: slot.0 }.into(),
                then: portolan_proto::control::AfterFlush::Close,
                options_blob: SocketOptionsBlob(self.octets.clone()),
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
            let mut octets = encode(&damaged.genuine());
            round_trip::<Request>(&octets);
            for &(at, value) in damaged.changes.iter().take(8) {
                let at = usize::from(at) % octets.len();
                octets[at] = value;
            }
            if let Some(cut) = damaged.cut {
                octets.truncate(usize::from(cut) % (octets.len() + 1));
            }
            round_trip::<Request>(&octets);
        });
}

#[test]
fn octets_after_a_message_are_refused() {
    let request = Request {
        id: 1,
        body: RequestBody::Probe,
    };
    let mut octets = encode(&request);
    octets.push(0);
    assert!(matches!(decode::<Request>(&octets), Err(Malformed)));
}
