//! The order of what is recorded, and files that must not be believed.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use portolan_proto::qos::{GroupOptions, Rate, Receive, Slack, Transmit};
use portolan_types::{FlowKey, Protocol};

use super::*;

const ROOT: Credentials = Credentials {
    pid: 1,
    uid: 0,
    gid: 0,
};

fn transmit(port: u16, bits: u64) -> QosRequest {
    QosRequest::Transmit {
        scope: Scope::Port {
            protocol: Protocol::Tcp,
            port,
        },
        spec: Transmit {
            device: Some("eth0".to_owned()),
            rate: Rate::Bits(bits),
            burst: None,
            slack: Slack::All,
        },
    }
}

fn link(bits: u64) -> QosRequest {
    QosRequest::Link {
        device: "eth0".to_owned(),
        bits: Some(bits),
    }
}

fn receive() -> QosRequest {
    QosRequest::Receive {
        scope: Scope::Flow(FlowKey {
            protocol: Protocol::Udp,
            local: "10.0.0.1:53".parse().unwrap(),
            remote: "[2001:db8::1]:4000".parse().unwrap(),
        }),
        spec: Receive {
            packets: Some(7),
            bits: None,
            burst_ms: 50,
            priority: Some(3),
        },
    }
}

fn group() -> QosRequest {
    QosRequest::Group {
        key: 7,
        action: GroupAction::Create {
            device: None,
            bits: 1_000_000,
            mode: 0o711,
            options: GroupOptions::default(),
            algorithm: portolan_proto::qos::Algorithm::RateControlled,
        },
    }
}

fn granted(request: QosRequest) -> Granted {
    Granted::new(ROOT, request, Some(ClassId(0x10))).unwrap()
}

fn standing(requests: impl IntoIterator<Item = QosRequest>) -> Standing {
    let mut standing = Standing::default();
    for request in requests {
        standing.note(granted(request), State::InForce);
    }
    standing.prune(|_| true);
    standing
}

fn requests(standing: &Standing) -> Vec<QosRequest> {
    let entries = standing.entries.iter();
    entries.map(|entry| entry.granted.request.clone()).collect()
}

/// A file in a directory of its own.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let folder = std::env::temp_dir().join(format!("guarantees-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Place(folder.join("control"))
    }

    fn file(&self) -> RecordFile {
        RecordFile::beside(&self.0, "boot 1")
    }

    fn path(&self) -> PathBuf {
        self.0.with_file_name("control.guarantees")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.0.parent().unwrap());
    }
}

#[test]
fn a_later_request_replaces_an_earlier_one() {
    let all = standing([transmit(1, 10), transmit(2, 20), transmit(1, 30)]);
    assert_eq!(requests(&all), [transmit(2, 20), transmit(1, 30)]);
}

#[test]
fn links_have_their_rates_before_anything_is_reserved() {
    let all = standing([link(100), transmit(1, 60), link(50)]);
    assert_eq!(requests(&all), [link(50), transmit(1, 60)]);
}

#[test]
fn what_has_ended_is_not_recorded_and_what_is_awaited_is() {
    let mut all = standing([transmit(1, 10)]);
    all.note(granted(receive()), State::Awaited);
    all.prune(|_| false);
    assert_eq!(requests(&all), [receive()]);
    let scope = granted(receive()).scope().cloned().unwrap();
    assert_eq!(all.take_awaited(&scope), [granted(receive())]);
    assert!(all.take_awaited(&scope).is_empty());
}

#[test]
fn a_group_keeps_its_last_rate() {
    let mut all = standing([group()]);
    all.change_group(7, |action| {
        if let GroupAction::Create { bits, .. } = action {
            *bits = 5;
        }
    });
    let [
        QosRequest::Group {
            action: GroupAction::Create { bits, .. },
            ..
        },
    ] = requests(&all)[..]
    else {
        panic!("{all:?}");
    };
    assert_eq!(bits, 5);
}

#[test]
fn what_is_written_is_read_and_an_empty_record_is_no_file() {
    let place = Place::new("written");
    assert_eq!(place.file().read().unwrap(), []);
    let all = [link(100), group(), transmit(1, 60), receive()].map(granted);
    for _ in 0..2 {
        place.file().write(all.iter()).unwrap();
        assert_eq!(place.file().read().unwrap(), all);
    }
    let mode = fs::metadata(place.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    place.file().write([].iter()).unwrap();
    assert!(!place.path().exists());
}

#[test]
fn lines_that_are_not_understood_are_skipped() {
    let place = Place::new("lines");
    place.file().write([granted(link(100))].iter()).unwrap();
    let text = fs::read_to_string(place.path()).unwrap();
    fs::write(place.path(), text + "{\"uid\":0}\n\u{1}\n").unwrap();
    assert_eq!(place.file().read().unwrap(), [granted(link(100))]);
}

#[test]
fn records_of_other_versions_and_namespaces_are_not_read() {
    let place = Place::new("heads");
    place.file().write([granted(link(100))].iter()).unwrap();
    assert_eq!(RecordFile::beside(&place.0, "boot 2").read().unwrap(), []);
    let text = fs::read_to_string(place.path()).unwrap();
    fs::write(place.path(), text.replace("guarantees 1", "guarantees 2")).unwrap();
    assert!(place.file().read().is_err());
}

#[test]
fn a_file_that_others_could_have_written_is_not_believed() {
    let place = Place::new("others");
    place.file().write([granted(link(100))].iter()).unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o622)).unwrap();
    assert!(place.file().read().is_err());
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o600)).unwrap();
    assert!(place.file().read().is_ok());
    let elsewhere = place.path().with_extension("elsewhere");
    fs::rename(place.path(), &elsewhere).unwrap();
    symlink(&elsewhere, place.path()).unwrap();
    assert!(place.file().read().is_err());
    // Nor is the link followed when the record is written.
    place.file().write([granted(link(1))].iter()).unwrap();
    assert_eq!(place.file().read().unwrap(), [granted(link(1))]);
    assert!(fs::read_to_string(elsewhere).unwrap().contains("100"));
}
