//! MS Fig. 9, and options that a peer may send.

use super::*;

const HANDLE: Handle = Handle {
    index: 7,
    nonce: 42,
    marker: 0x0c,
};

fn edge(sent: u32, allowed: u32) -> Edge {
    Edge {
        sent: SeqNum(sent),
        allowed: SeqNum(allowed),
    }
}

fn advertise(sequence: u8) -> DemuxOption {
    let handle = Handle {
        index: sequence.into(),
        ..HANDLE
    };
    DemuxOption::Advertise { sequence, handle }
}

#[test]
fn an_advertisement_goes_with_each_segment_until_one_has_surely_arrived() {
    for (acknowledged, received) in [(101, 0), (0, 201)] {
        let mut demux = Demux::default();
        assert_eq!(demux.option(), None);
        demux.advertise(HANDLE, edge(100, 200));
        demux.progress(SeqNum(100), SeqNum(200));
        let (sequence, handle) = (1, HANDLE);
        assert_eq!(
            demux.option(),
            Some(DemuxOption::Advertise { sequence, handle })
        );
        demux.progress(SeqNum(acknowledged), SeqNum(received));
        assert_eq!(demux.option(), None);
    }
}

#[test]
fn a_revocation_takes_the_place_of_an_advertisement_and_of_nothing_else() {
    let mut demux = Demux::default();
    demux.revoke(edge(100, 200));
    assert_eq!(demux.option(), None, "nothing to revoke");
    demux.advertise(HANDLE, edge(100, 200));
    demux.revoke(edge(300, 400));
    assert_eq!(demux.option(), Some(DemuxOption::Revoke { sequence: 2 }));
    demux.revoke(edge(500, 600));
    assert_eq!(demux.option(), Some(DemuxOption::Revoke { sequence: 2 }));
    demux.progress(SeqNum(301), SeqNum(0));
    assert_eq!(demux.option(), None);
}

#[test]
fn a_new_handle_is_advertised_while_the_old_one_is_still_revoked() {
    let mut demux = Demux::default();
    demux.advertise(HANDLE, edge(0, 0));
    demux.revoke(edge(10, 10));
    let handle = Handle {
        nonce: 43,
        ..HANDLE
    };
    demux.advertise(handle, edge(20, 20));
    demux.progress(SeqNum(11), SeqNum(11));
    let sequence = 3;
    assert_eq!(
        demux.option(),
        Some(DemuxOption::Advertise { sequence, handle })
    );
}

#[test]
fn operations_count_in_the_order_of_their_numbers() {
    let mut demux = Demux::default();
    let mut after = |option| {
        demux.hear(option);
        demux.enclosed().map(|handle| handle.index)
    };
    let revoke = |sequence| DemuxOption::Revoke { sequence };
    assert_eq!(after(advertise(5)), Some(5));
    assert_eq!(after(revoke(4)), Some(5));
    assert_eq!(after(revoke(5)), Some(5));
    assert_eq!(after(revoke(6)), None);
    assert_eq!(after(advertise(5)), None);
    // Numbers wrap.
    for sequence in [100, 200, 40] {
        assert_eq!(after(advertise(sequence)), Some(sequence.into()));
    }
}

#[test]
fn a_flood_of_advertisements_leaves_one_handle() {
    let mut demux = Demux::default();
    for round in 0..100_000 {
        demux.hear(advertise((round % 256) as u8));
    }
    assert!(demux.enclosed().is_some());
    assert!(size_of::<Demux>() < 128);
}

#[test]
fn nobody_can_ask_for_other_marks_than_those_for_local_use() {
    let handle = Handle {
        marker: 0xb8,
        ..HANDLE
    };
    let mut demux = Demux::default();
    let sequence = 1;
    demux.hear(DemuxOption::Advertise { sequence, handle });
    assert_eq!(demux.enclosed(), None);
}

#[test]
fn after_a_loss_nothing_is_enclosed_any_more() {
    let mut demux = Demux::default();
    assert!(!demux.doubt(), "nothing was enclosed");
    demux.hear(advertise(1));
    assert!(demux.doubt());
    demux.hear(advertise(2));
    assert_eq!(demux.enclosed(), None);
}

#[test]
fn a_capsule_gets_no_other_mark_in_either() {
    let with = |marker| Demux {
        peers: Some(Handle { marker, ..HANDLE }),
        ..Demux::default()
    };
    assert!(Demux::default().is_sound() && with(0x0c).is_sound());
    assert!(!with(0xb8).is_sound());
}
