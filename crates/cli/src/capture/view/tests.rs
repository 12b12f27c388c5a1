//! What processes and the server say, as packets.

use std::os::fd::AsFd;

use portolan_sys::shm::{CaptureWriter, create_capture};

use super::*;

const CHANNEL: ChannelId = ChannelId(3);

fn end(session: u64, side: Side) -> CapturedEnd {
    CapturedEnd {
        channel: CHANNEL,
        session: SessionId(session),
        pair: 1,
        side,
        opener: "127.0.0.1:40000".parse().unwrap(),
        accepter: "127.0.0.1:80".parse().unwrap(),
        from_opener: 0,
        from_accepter: 0,
        at: 1,
    }
}

/// A view of one process, which has written nothing yet.
fn scene() -> (View<Vec<u8>>, CaptureWriter) {
    let memory = create_capture(0).unwrap();
    let writer = CaptureWriter::map(memory.as_fd()).unwrap();
    let file = PcapNg::begin(Vec::new(), "test").unwrap();
    let mut view = View::new(file, u64::MAX);
    let news = CaptureNews::Process {
        channel: CHANNEL,
        pid: 7,
        program: "odd\x1b".to_owned(),
    };
    view.hear(news, vec![memory]).unwrap();
    (view, writer)
}

fn closed(side: Side) -> CaptureNews {
    CaptureNews::Closed {
        pair: 1,
        side,
        is_reset: false,
    }
}

fn sent(session: u64, position: u64, bytes: &[u8]) -> RecordHeader {
    RecordHeader {
        session,
        position,
        at: 2,
        length: bytes.len() as u32,
        captured: bytes.len() as u32,
        ..RecordHeader::default()
    }
}

#[test]
fn a_process_records_the_ends_that_the_server_has_named() {
    let (mut view, mut writer) = scene();
    writer.write(&sent(4, 0, b"others'"), b"others'");
    writer.write(&sent(5, 0, b"own"), b"own");
    view.collect();
    view.hear(CaptureNews::Ends(vec![end(5, Side::Opener)]), Vec::new())
        .unwrap();
    assert_eq!(view.write().unwrap(), 4, "the handshake, and its own");
}

#[test]
fn an_ending_waits_for_the_records_before_it() {
    let (mut view, mut writer) = scene();
    view.hear(CaptureNews::Ends(vec![end(5, Side::Opener)]), Vec::new())
        .unwrap();
    view.collect();
    writer.write(&sent(5, 0, b"last"), b"last");
    view.hear(closed(Side::Opener), Vec::new()).unwrap();
    view.hear(closed(Side::Accepter), Vec::new()).unwrap();
    view.hear(CaptureNews::ProcessGone(CHANNEL), Vec::new())
        .unwrap();
    assert_eq!(view.write().unwrap(), 3, "the handshake");
    view.collect();
    assert_eq!(view.write().unwrap(), 3, "data and two FINs");
    assert!(view.sessions.is_empty() && view.ends.is_empty() && view.recorders.is_empty());
}

/// The other end, which nobody records, is closed while this one has not seen all that it sent.
#[test]
fn the_close_of_an_end_that_is_not_recorded_waits_for_the_records_of_the_other_end() {
    let (mut view, mut writer) = scene();
    view.hear(CaptureNews::Ends(vec![end(5, Side::Opener)]), Vec::new())
        .unwrap();
    view.hear(closed(Side::Accepter), Vec::new()).unwrap();
    view.collect();
    assert_eq!(view.write().unwrap(), 3, "the handshake");
    let received = RecordHeader {
        direction: direction::IN,
        ..sent(5, 0, b"late")
    };
    writer.write(&received, b"late");
    view.hear(closed(Side::Opener), Vec::new()).unwrap();
    view.collect();
    assert_eq!(view.write().unwrap(), 3, "data and two FINs");
    assert!(view.sessions.is_empty() && view.ends.is_empty());
}

#[test]
fn a_malformed_ring_is_read_no_more_and_counted() {
    let memory = create_capture(0).unwrap();
    // A head without records.
    rustix::io::pwrite(&memory, &u64::MAX.to_ne_bytes(), 0).unwrap();
    let (mut view, mut writer) = scene();
    let other = CaptureNews::Process {
        channel: ChannelId(9),
        pid: 8,
        program: "hostile".to_owned(),
    };
    view.hear(other, vec![memory]).unwrap();
    view.hear(CaptureNews::Ends(vec![end(5, Side::Accepter)]), Vec::new())
        .unwrap();
    writer.write(&sent(5, 0, b"own"), b"own");
    view.collect();
    assert_eq!(view.write().unwrap(), 4);
    assert_eq!(view.dropped(), 1);
    view.finish().unwrap();
}

#[test]
fn no_more_packets_are_written_than_wanted() {
    let (mut view, mut writer) = scene();
    view.most = 2;
    view.hear(CaptureNews::Ends(vec![end(5, Side::Opener)]), Vec::new())
        .unwrap();
    writer.write(&sent(5, 0, b"own"), b"own");
    view.collect();
    assert_eq!(view.write().unwrap(), 2);
    assert!(view.is_full());
}

#[test]
fn a_frame_is_a_packet_of_its_process_of_the_length_that_it_had() {
    let (mut view, mut writer) = scene();
    let header = RecordHeader {
        length: 1514,
        captured: 4,
        direction: direction::IN,
        flags: flags::FRAME,
        ..sent(0, 0, b"head")
    };
    writer.write(&header, b"head");
    view.collect();
    assert_eq!(view.write().unwrap(), 1);
    let file = view.file.into_inner();
    let wanted = [&4u32.to_le_bytes()[..], &1514u32.to_le_bytes(), b"head"].concat();
    assert!(file.windows(wanted.len()).any(|found| found == wanted));
}
