//! A full transmit queue delays only its own sessions, and a change of queues keeps frames in order.

use super::*;

/// A wire with two transmit queues: which of them are full, and what was sent through each.
#[derive(Default)]
struct TwoQueues {
    chosen: TxQueueId,
    full: Vec<TxQueueId>,
    /// Becomes full after each frame.
    is_narrow: bool,
    frames: Vec<(TxQueueId, Vec<u8>)>,
}

const SLOW: TxQueueId = TxQueueId(1);

impl Wire for TwoQueues {
    fn transmit(&mut self, frame: &Frame<'_>) {
        let bytes = [frame.head, frame.payload[0], frame.payload[1]].concat();
        self.frames.push((self.chosen, bytes));
        if self.is_narrow {
            self.full.push(self.chosen);
        }
    }

    fn is_full(&self) -> bool {
        self.full.contains(&self.chosen)
    }

    fn choose(&mut self, tx_queue: TxQueueId) {
        self.chosen = tx_queue;
    }
}

impl TwoQueues {
    fn tx_queues(&self) -> Vec<TxQueueId> {
        self.frames.iter().map(|(tx_queue, _)| *tx_queue).collect()
    }
}

fn known() -> Routes {
    routes(2, at(A), at(B), true)
}

fn send_to(a: &mut Stack, slot: Slot, wire: &mut TwoQueues) -> Result<usize, SendError> {
    let usual = Sending::default();
    a.send_datagram(slot, Some(at(B)), [b"x", b""], &usual, &known(), wire)
}

#[test]
fn a_full_tx_queue_stops_its_own_sessions_only() {
    let mut a = Stack::new(now());
    let (slow, other) = (connecting(&mut a), connecting(&mut a));
    a.set_tx_queue(slow, SLOW);
    let mut wire = TwoQueues::default();
    // It leaves the main transmit queue, which must have room for that.
    a.output(now(), &known(), &mut wire);
    assert_eq!(wire.tx_queues(), [SLOW, TxQueueId::MAIN]);

    wire.frames.clear();
    wire.full.push(SLOW);
    a.touch(slow);
    a.touch(other);
    for slot in [slow, other] {
        a.tcp(slot).unwrap().connection.on_timer(now() + HOUR);
    }
    a.output(now() + HOUR, &known(), &mut wire);
    assert_eq!(wire.tx_queues(), [TxQueueId::MAIN]);
    assert!(a.has_output());

    wire.full.clear();
    a.output(now() + HOUR, &known(), &mut wire);
    assert_eq!(wire.tx_queues(), [TxQueueId::MAIN, SLOW]);
    assert!(!a.has_output());
}

#[test]
fn a_session_that_is_about_to_leave_sends_nothing_unless_it_stays() {
    let mut a = Stack::new(now());
    let (leaving, _other) = (connecting(&mut a), connecting(&mut a));
    a.suspend_tx(leaving);
    let mut wire = TwoQueues::default();
    a.output(now(), &known(), &mut wire);
    assert_eq!(wire.frames.len(), 1, "the other's");
    assert!(!a.has_output());
    a.resume_tx(leaving);
    a.output(now(), &known(), &mut wire);
    assert_eq!(wire.frames.len(), 2);
}

#[test]
fn a_session_leaves_a_tx_queue_when_nothing_waits_there() {
    let mut a = Stack::new(now());
    let slot = udp(&mut a, at(A));
    let mut wire = TwoQueues::default();
    a.set_tx_queue(slot, SLOW);
    wire.full.push(TxQueueId::MAIN);
    assert_eq!(send_to(&mut a, slot, &mut wire), Err(SendError::Full));
    assert!(a.uses_tx_queue(TxQueueId::MAIN) && a.uses_tx_queue(SLOW));

    wire.full.clear();
    assert_eq!(send_to(&mut a, slot, &mut wire), Ok(1));
    assert_eq!(wire.tx_queues(), [SLOW]);
    assert!(!a.uses_tx_queue(TxQueueId::MAIN));
}

#[test]
fn a_refused_datagram_is_followed_by_news_when_there_is_room() {
    let mut a = Stack::new(now());
    let slot = udp(&mut a, at(A));
    let mut wire = TwoQueues {
        is_narrow: true,
        ..TwoQueues::default()
    };
    assert_eq!(send_to(&mut a, slot, &mut wire), Ok(1));
    assert_eq!(send_to(&mut a, slot, &mut wire), Err(SendError::Full));
    assert!(!a.has_room(slot, &mut wire));
    a.output(now(), &known(), &mut wire);
    assert_eq!(a.changed().count(), 0);

    wire.full.clear();
    a.output(now(), &known(), &mut wire);
    assert_eq!(a.changed().collect::<Vec<_>>(), [(slot, Events::WRITABLE)]);
    assert!(a.has_room(slot, &mut wire));
}

const HOUR: core::time::Duration = core::time::Duration::from_secs(3600);

/// A connection with a completed handshake.
fn established(a: &mut Stack) -> Slot {
    let slot = connecting(a);
    let mut wire = KeptFrames::with_room(2);
    a.output(now(), &known(), &mut wire);
    let syn = wire.frames.pop().unwrap();
    let syn = Packet::parse(received(&syn), &RecordHeader::default()).unwrap();
    let Transport::Tcp { header, .. } = &syn.transport else {
        panic!("{syn:?}");
    };
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: at(B),
        remote: at(A),
    };
    let connection = Connection::accept(&Config::default(), header, SeqNum(9), now());
    let session = TcpSession::new(SessionId(2), flow, connection);
    let mut b = Stack::new(now());
    b.insert(now(), Session::Tcp(Box::new(session)));
    b.output(now(), &routes(2, at(B), at(A), true), &mut wire);
    a.input(now(), &record(slot, 0), received(&wire.frames[0]));
    a.output(now(), &known(), &mut wire);
    slot
}

#[test]
fn sessions_take_turns_at_a_full_tx_queue() {
    let mut a = Stack::new(now());
    let slots = [(); 3].map(|()| established(&mut a));
    for (slot, byte) in slots.into_iter().zip(*b"xyz") {
        let connection = &mut a.tcp(slot).unwrap().connection;
        assert_eq!(connection.send(now(), &[byte; 14_000]), 14_000);
        a.touch(slot);
    }
    let mut wire = TwoQueues {
        is_narrow: true,
        ..TwoQueues::default()
    };
    for _ in 0..6 {
        wire.full.clear();
        a.output(now(), &known(), &mut wire);
    }
    let last = |(_, frame): &(TxQueueId, Vec<u8>)| frame.last().copied();
    let who: Vec<u8> = wire.frames.iter().filter_map(last).collect();
    assert_eq!(who[3..], who[..3]);
    assert!(b"xyz".iter().all(|byte| who.contains(byte)), "{who:?}");
}
