//! Two ends over one memory: TCP's semantics, an oracle, a hostile peer, and lost wake-ups.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use portolan_fuzz::check;
use portolan_proto::local::{RING_MIN, Side, flags, holder};
use portolan_sys::shm::Rings;
use portolan_sys::word;
use portolan_tcp::{Error, Events, OrphanWait, OutOfBand, StateName};
use portolan_types::Instant;
use rustix::io::Errno;

use super::*;
use crate::end::CYCLE;

const NOW: Instant = Instant::ZERO;

thread_local! {
    static CHANCE: Cell<u32> = const { Cell::new(0x9e37_79b9) };
}

/// Does nothing, or spins for about as long as a cache line takes between processors.
pub(crate) fn pause() {
    CHANCE.with(|chance| {
        // Marsaglia's xorshift.
        let mut next = chance.get();
        next ^= next << 13;
        next ^= next >> 17;
        next ^= next << 5;
        chance.set(next);
        for _ in 0..next % 64 {
            std::hint::spin_loop();
        }
    });
}

fn memory(bytes: usize) -> Arc<Rings> {
    Arc::new(Rings::map(Rings::create(bytes).unwrap()).unwrap())
}

fn pair() -> (Local, Local) {
    let rings = memory(RING_MIN);
    let other = Arc::clone(&rings);
    (
        Local::new(rings, Side::Opener),
        Local::new(other, Side::Accepter),
    )
}

/// Publishes the changes of one end, and returns the events that the peer sees.
fn tell(from: &mut Local, to: &mut Local) -> Events {
    let _ = from.publish(NOW);
    to.look(NOW)
}

fn read_all(end: &mut Local) -> Vec<u8> {
    let mut bytes = vec![0; end.readable()];
    let count = end.recv(NOW, &mut bytes);
    bytes.truncate(count);
    bytes
}

/// When what `to` finds now arose, after `from` has shown it at `at` milliseconds.
fn found_after(at: &[u64], from: &mut Local, to: &mut Local) -> Duration {
    for at in at.iter().map(|at| NOW + Duration::from_millis(*at)) {
        from.send(at, b"x");
        let _ = from.publish(at);
    }
    let last = at.last().copied().unwrap_or_default();
    to.look(NOW + Duration::from_millis(last + 1));
    to.news_at().since(NOW)
}

#[test]
fn news_is_as_old_as_the_first_that_was_not_seen() {
    let ms = Duration::from_millis;
    let (mut a, mut b) = pair();
    assert_eq!(found_after(&[10, 20], &mut a, &mut b), ms(10));
    // What was seen is not news, read or not.
    assert_eq!(found_after(&[30], &mut a, &mut b), ms(30));
    assert_eq!(read_all(&mut b), b"xxx");
    tell(&mut b, &mut a);
    assert_eq!(found_after(&[40, 50], &mut a, &mut b), ms(40));
    // Who has slept in between has seen what was there.
    b.arm(WakeBy::Notifier);
    assert_eq!(found_after(&[60, 70], &mut a, &mut b), ms(60));
    a.shutdown_send(NOW);
    let _ = a.publish(NOW + ms(80));
    b.look(NOW + ms(90));
    assert_eq!(b.news_at(), NOW + ms(80));
}

#[test]
fn room_is_as_old_as_its_first() {
    let ms = Duration::from_millis;
    let (mut a, mut b) = pair();
    a.send(NOW, &[1; 2 * RING_MIN]);
    tell(&mut a, &mut b);
    // A good deal is there after the second of three.
    for at in [10, 20, 30] {
        b.recv(NOW, &mut [0; RING_MIN / 4]);
        let _ = b.publish(NOW + ms(at));
    }
    assert_eq!(a.look(NOW + ms(40)), Events::WRITABLE);
    assert_eq!(a.news_at(), NOW + ms(20));
}

#[test]
fn times_that_a_peer_makes_up_are_not_later_than_now() {
    let (mut a, mut b) = pair();
    let now = NOW + Duration::from_secs(1);
    a.send(now, b"x");
    let _ = a.publish(Instant::from_nanos(u64::MAX));
    b.look(now);
    assert_eq!(b.news_at(), now);
}

#[test]
fn bytes_come_out_in_order_and_partial_writes_are_told() {
    let (mut a, mut b) = pair();
    assert_eq!(a.send(NOW, b"hello"), 5);
    assert_eq!(b.look(NOW), Events::NONE, "not told yet");
    assert_eq!(tell(&mut a, &mut b), Events::READABLE);
    let mut seen = [0; 3];
    assert_eq!(b.peek(1, &mut seen), 3);
    assert_eq!(&seen, b"ell");
    assert_eq!(read_all(&mut b), b"hello");

    let long = vec![7; 3 * RING_MIN];
    tell(&mut b, &mut a);
    assert_eq!(a.send(NOW, &long), RING_MIN);
    assert!(!a.poll_writable());
    tell(&mut a, &mut b);
    assert_eq!(read_all(&mut b).len(), RING_MIN);
    assert_eq!(tell(&mut b, &mut a), Events::WRITABLE);
    assert!(a.poll_writable());
}

#[test]
fn short_messages_always_use_the_same_memory() {
    let rings = memory(RING_MIN);
    let mut a = Local::new(Arc::clone(&rings), Side::Opener);
    let mut b = Local::new(Arc::clone(&rings), Side::Accepter);
    for round in 0..200_u8 {
        a.send(NOW, &[round; 1000]);
        tell(&mut a, &mut b);
        assert_eq!(read_all(&mut b), [round; 1000]);
        tell(&mut b, &mut a);
    }
    let mut ring = vec![0; RING_MIN];
    rings.get(Side::Opener, RING_MIN, 0, &mut ring);
    assert!(ring[1000..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_half_close_ends_one_direction() {
    let (mut a, mut b) = pair();
    a.send(NOW, b"x");
    a.shutdown_send(NOW);
    assert_eq!(a.send(NOW, b"y"), 0);
    let events = tell(&mut a, &mut b);
    assert_eq!(events, Events::READABLE | Events::PEER_CLOSED);
    assert_eq!(
        (a.state(), b.state()),
        (StateName::FinWait2, StateName::CloseWait)
    );
    assert!(!b.is_receive_finished());
    assert_eq!(read_all(&mut b), b"x");
    assert!(b.is_receive_finished() && !b.is_send_closed());
    b.send(NOW, b"z");
    b.shutdown_send(NOW);
    tell(&mut b, &mut a);
    assert_eq!(read_all(&mut a), b"z");
    assert!(a.is_closed() && b.is_closed() && a.error().is_none());
}

#[test]
fn the_end_that_closes_first_goes_through_the_waiting_states() {
    let minute = Duration::from_secs(60);
    let (mut a, mut b) = pair();
    a.close(NOW);
    tell(&mut a, &mut b);
    assert_eq!(a.remains(), Remains::FinWait(minute));
    b.close(NOW);
    tell(&mut b, &mut a);
    assert_eq!(
        (a.remains(), b.remains()),
        (Remains::TimeWait, Remains::Nothing)
    );

    let (mut a, mut b) = pair();
    a.shutdown_send(NOW);
    tell(&mut a, &mut b);
    b.close(NOW);
    tell(&mut b, &mut a);
    a.close(NOW);
    assert_eq!(
        (a.remains(), b.remains()),
        (Remains::TimeWait, Remains::Nothing)
    );

    let (mut a, mut b) = pair();
    a.close(NOW);
    b.close(NOW);
    tell(&mut a, &mut b);
    tell(&mut b, &mut a);
    assert_eq!(
        (a.remains(), b.remains()),
        (Remains::TimeWait, Remains::TimeWait),
        "at the same time"
    );

    let (mut a, mut b) = pair();
    a.abort(NOW);
    tell(&mut a, &mut b);
    b.close(NOW);
    assert_eq!(
        (a.remains(), b.remains()),
        (Remains::Nothing, Remains::Nothing)
    );
}

#[test]
fn an_end_waits_for_the_other_one_as_long_as_its_program_says() {
    let seconds = Duration::from_secs;
    for (wait, remains) in [
        (OrphanWait::Default, Remains::FinWait(seconds(60))),
        (OrphanWait::For(seconds(5)), Remains::FinWait(seconds(5))),
        (
            OrphanWait::For(seconds(9999)),
            Remains::FinWait(seconds(120)),
        ),
        (OrphanWait::Never, Remains::Nothing),
    ] {
        let (mut a, mut b) = pair();
        a.options().orphan_wait = wait;
        a.send(NOW, b"last");
        a.close(NOW);
        tell(&mut a, &mut b);
        assert_eq!(a.remains(), remains);
        assert_eq!(read_all(&mut b), b"last");
        let error = (wait == OrphanWait::Never).then_some(Error::BrokenPipe);
        assert_eq!(b.take_error(), error);
    }
}

#[test]
fn a_close_with_bytes_unread_resets_and_what_was_sent_before_can_be_read() {
    let (mut a, mut b) = pair();
    a.send(NOW, b"kept");
    b.send(NOW, b"never read");
    tell(&mut a, &mut b);
    assert_eq!(b.publish(NOW), None);
    a.close(NOW);
    assert_eq!(tell(&mut a, &mut b), Events::ERROR | Events::CLOSED);
    assert_eq!(read_all(&mut b), b"kept");
    assert_eq!(b.take_error(), Some(Error::Reset));
    assert!(b.is_receive_finished() && b.is_send_closed());
}

#[test]
fn a_write_to_an_end_that_is_gone_is_taken_and_the_next_finds_a_broken_pipe() {
    let (mut a, mut b) = pair();
    a.close(NOW);
    assert_eq!(tell(&mut a, &mut b), Events::PEER_CLOSED);
    assert_eq!(b.state(), StateName::CloseWait);
    assert_eq!(b.send(NOW, b"lost"), 4);
    assert_eq!(b.look(NOW), Events::ERROR | Events::CLOSED);
    assert_eq!(b.take_error(), Some(Error::BrokenPipe));
    assert_eq!(b.send(NOW, b"x"), 0);
}

#[test]
fn an_abort_discards_nothing_that_the_peer_has() {
    let (mut a, mut b) = pair();
    a.send(NOW, b"kept");
    a.abort(NOW);
    tell(&mut a, &mut b);
    assert_eq!(read_all(&mut b), b"kept");
    assert_eq!(b.take_error(), Some(Error::Reset));
}

#[test]
fn the_urgent_byte_stands_beside_the_stream_or_in_it() {
    for inline in [false, true] {
        let (mut a, mut b) = pair();
        b.options().urgent_inline = inline;
        a.send(NOW, b"ab!");
        a.mark_urgent();
        a.send(NOW, b"cd");
        let events = tell(&mut a, &mut b);
        assert!(events.contains(Events::URGENT | Events::PRIORITY));
        assert_eq!((b.readable(), b.is_at_mark()), (2, false));
        assert_eq!(b.inquiry(), if inline { 5 } else { 2 });
        assert_eq!(read_all(&mut b), b"ab");
        assert!(b.is_at_mark() && b.has_urgent());
        if inline {
            assert_eq!(b.take_urgent(), OutOfBand::Nothing);
            assert_eq!(read_all(&mut b), b"!cd");
        } else {
            assert_eq!(b.peek_urgent(), OutOfBand::Byte(b'!'));
            assert_eq!(b.take_urgent(), OutOfBand::Byte(b'!'));
            assert_eq!(b.take_urgent(), OutOfBand::Nothing);
            assert!(!b.has_urgent());
            assert_eq!(read_all(&mut b), b"cd");
        }
        assert!(!b.is_at_mark());
    }
}

#[test]
fn the_next_holder_goes_on_where_the_last_one_stopped() {
    let rings = memory(RING_MIN);
    let mut a = Local::new(Arc::clone(&rings), Side::Opener);
    let mut b = Local::new(Arc::clone(&rings), Side::Accepter);
    a.send(NOW, b"one");
    a.mark_urgent();
    a.send(NOW, b"two");
    tell(&mut a, &mut b);
    b.recv(NOW, &mut [0; 1]);
    assert_eq!(b.take_urgent(), OutOfBand::Byte(b'e'));
    b.shutdown_receive();
    let _ = b.publish(NOW);

    let mut b = Local::new(Arc::clone(&rings), Side::Accepter);
    assert_eq!(b.peek_urgent(), OutOfBand::Nothing);
    assert_eq!(read_all(&mut b), b"n");
    assert_eq!(read_all(&mut b), b"two");
    assert!(b.is_receive_finished());
    tell(&mut b, &mut a);
    a.send(NOW, b"more");
    let _ = a.publish(NOW);
    let mut a = Local::new(rings, Side::Opener);
    a.send(NOW, b"!");
    tell(&mut a, &mut b);
    assert_eq!(read_all(&mut b), b"more!");
}

#[test]
fn buffers_bound_what_may_lie_between_two_ends() {
    let (mut a, mut b) = pair();
    a.set_send_buffer(3000);
    b.set_receive_buffer(4000);
    assert_eq!(a.send(NOW, &[0; RING_MIN]), 7000);
    tell(&mut a, &mut b);
    b.recv(NOW, &mut [0; 3000]);
    assert_eq!(tell(&mut b, &mut a), Events::WRITABLE);
}

#[test]
fn a_reader_that_reads_is_not_left_far_behind() {
    let cycle = CYCLE as usize;
    let bytes: Vec<u8> = (0..RING_MIN).map(|index| (index % 251) as u8).collect();
    let (mut a, mut b) = pair();
    // Nothing was read: as much as the buffers hold.
    assert_eq!(a.send(NOW, &bytes[..cycle - 10]), cycle - 10);
    tell(&mut a, &mut b);
    assert_eq!(a.send(NOW, &bytes[cycle - 10..]), RING_MIN - cycle + 10);
    tell(&mut a, &mut b);
    assert!(read_all(&mut b) == bytes, "in the places of a larger cycle");
    tell(&mut b, &mut a);
    // Data was read: no more than a cycle.
    assert_eq!(a.send(NOW, &bytes[..100]), 100);
    tell(&mut a, &mut b);
    assert_eq!(b.recv(NOW, &mut [0; 1]), 1);
    tell(&mut b, &mut a);
    assert_eq!(a.send(NOW, &bytes[100..]), cycle - 99);
    assert!(!a.poll_writable());
    tell(&mut a, &mut b);
    assert!(read_all(&mut b) == bytes[1..=cycle], "over the cycle's end");
    assert_eq!(tell(&mut b, &mut a), Events::WRITABLE);
}

#[test]
fn a_buffer_that_grows_wakes_who_waits_for_room() {
    for grows_here in [true, false] {
        let (mut a, mut b) = pair();
        a.set_send_buffer(3000);
        b.set_receive_buffer(2000);
        a.give_to(7);
        assert_eq!(a.send(NOW, &[1; 6000]), 5000);
        tell(&mut a, &mut b);
        a.arm(WakeBy::Notifier);
        assert_eq!(a.look(NOW), Events::NONE);
        if grows_here {
            a.set_send_buffer(9000);
        } else {
            b.set_receive_buffer(2000);
            assert_eq!(b.publish(NOW), None, "the same");
            b.set_receive_buffer(8000);
            assert!(b.has_output());
            assert_eq!(b.publish(NOW), Some(Wake::Notifier(7)));
        }
        assert_eq!(a.look(NOW), Events::WRITABLE);
        assert_eq!(a.send(NOW, &[1; 9000]), 6000);
    }
}

#[test]
fn what_is_corked_shows_when_it_is_uncorked_or_long_enough_or_late() {
    let later = NOW + Duration::from_millis(200);
    let uncork: [fn(&mut Local); 5] = [
        |a| a.options().cork = false,
        |a| {
            a.options().more = false;
            a.options().cork = false;
            a.send(NOW, b"");
        },
        |a| a.shutdown_send(NOW),
        |a| a.close(NOW),
        Local::push,
    ];
    for uncork in uncork {
        let (mut a, mut b) = pair();
        b.arm(WakeBy::Notifier);
        a.options().cork = true;
        a.send(NOW, b"one ");
        a.send(NOW + Duration::from_millis(50), b"two");
        assert_eq!(tell(&mut a, &mut b), Events::NONE);
        assert!(!b.was_rung());
        assert_eq!((b.readable(), a.pushes_at()), (0, Some(later)));
        uncork(&mut a);
        assert!(tell(&mut a, &mut b).contains(Events::READABLE));
        assert_eq!(read_all(&mut b), b"one two");
        assert_eq!(a.pushes_at(), None);
    }
    let (mut a, mut b) = pair();
    a.options().more = true;
    a.send(NOW, b"head");
    tell(&mut a, &mut b);
    assert_eq!(b.readable(), 0);
    a.options().more = false;
    a.send(NOW, b"tail");
    tell(&mut a, &mut b);
    assert_eq!(read_all(&mut b), b"headtail");
}

#[test]
fn segments_go_though_the_socket_is_corked() {
    let rings = memory(1 << 20);
    let mut a = Local::new(Arc::clone(&rings), Side::Opener);
    let mut b = Local::new(rings, Side::Accepter);
    a.options().cork = true;
    a.send(NOW, &[1; 200_000]);
    tell(&mut a, &mut b);
    assert_eq!(b.readable(), 3 * 65_483);
    assert!(a.pushes_at().is_some());
    a.push();
    tell(&mut a, &mut b);
    assert_eq!(b.readable(), 200_000);
    a.send(NOW, &[1; 10]);
    tell(&mut a, &mut b);
    assert_eq!(b.readable(), 200_000, "corked again");
}

#[test]
fn what_a_holder_has_corked_its_next_one_shows() {
    let rings = memory(RING_MIN);
    let mut a = Local::new(Arc::clone(&rings), Side::Opener);
    let mut b = Local::new(Arc::clone(&rings), Side::Accepter);
    a.options().cork = true;
    a.send(NOW, b"last words");
    tell(&mut a, &mut b);
    let mut a = Local::new(rings, Side::Opener);
    a.close(NOW);
    tell(&mut a, &mut b);
    assert_eq!(read_all(&mut b), b"last words");
    assert_eq!(b.error(), None);
}

#[test]
fn a_sleeper_is_rung_for_once() {
    let (mut a, b) = pair();
    b.give_to(7);
    b.arm(WakeBy::Notifier);
    assert!(!b.was_rung());
    a.send(NOW, b"x");
    assert_eq!(a.publish(NOW), Some(Wake::Notifier(7)));
    assert!(b.was_rung());
    a.send(NOW, b"y");
    assert_eq!(a.publish(NOW), None, "it knows");
    b.give_to(holder::NONE);
    b.arm(WakeBy::Notifier);
    a.send(NOW, b"z");
    assert_eq!(a.publish(NOW), None, "nobody is there");
}

/// Any sequence of calls on two ends moves bytes like two queues.
#[test]
fn two_ends_behave_like_two_queues() {
    check!(2000)
        .with_type::<Vec<(bool, u8, u16)>>()
        .for_each(|calls| {
            let (a, b) = pair();
            let mut ends = [a, b];
            let mut queues: [VecDeque<u8>; 2] = Default::default();
            let mut next = 0_u8;
            for &(which, call, size) in calls {
                let (own, other) = (usize::from(which), usize::from(!which));
                let size = usize::from(size) % (RING_MIN + 100);
                match call % 4 {
                    0 => {
                        let bytes: Vec<u8> =
                            (0..size).map(|i| next.wrapping_add(i as u8)).collect();
                        let count = ends[own].send(NOW, &bytes);
                        queues[own].extend(&bytes[..count]);
                        next = next.wrapping_add(count as u8);
                    }
                    1 => {
                        ends[own].look(NOW);
                        let mut got = vec![0; size];
                        let count = ends[own].recv(NOW, &mut got);
                        let expected: Vec<u8> = queues[other].drain(..count).collect();
                        assert_eq!(got[..count], expected);
                    }
                    2 => {
                        let _ = ends[own].publish(NOW);
                    }
                    _ => {
                        ends[own].look(NOW);
                        let mut got = vec![0; size];
                        let count = ends[own].peek(0, &mut got);
                        assert!(queues[other].iter().take(count).eq(&got[..count]));
                    }
                }
                assert!(queues[own].len() <= RING_MIN && ends[own].error().is_none());
            }
        });
}

/// Whatever the peer writes into its words, this end neither panics nor reads outside its memory;
/// it either continues or fails permanently.
#[test]
fn impossible_positions_of_its_own_reset_the_stream() {
    for word in [u64::MAX, u64::MAX - 1, 1 << 63, (1 << 62) + 1] {
        for is_sent in [false, true] {
            let rings = memory(RING_MIN);
            let own = &rings.ends().opener;
            if is_sent {
                own.sent.0.bytes.store(word, Relaxed);
            } else {
                own.taken.0.bytes.store(word, Relaxed);
            }
            let mut end = Local::new(Arc::clone(&rings), Side::Opener);
            let _ = end.tcp_info();
            assert_eq!(end.send(NOW, b"text"), 0);
            assert_eq!(end.take_error(), Some(Error::Aborted));
            assert!(end.is_closed());
            let _ = end.publish(NOW);
        }
    }
}

#[test]
fn a_hostile_peer_harms_only_the_stream() {
    check!(2000)
        .with_type::<Vec<(u8, u64)>>()
        .for_each(|calls| {
            let rings = memory(RING_MIN);
            let mut end = Local::new(Arc::clone(&rings), Side::Opener);
            let (own, peer) = (&rings.ends().opener, &rings.ends().accepter);
            let mut out = vec![0; 2 * RING_MIN];
            for &(call, word) in calls {
                match call % 16 {
                    0 => peer.sent.0.shown.store(word, Relaxed),
                    1 => peer.sent.0.shown.store(word % RING_MIN as u64, Relaxed),
                    2 => peer.taken.0.bytes.store(word, Relaxed),
                    3 => peer.sent.0.flags.store(word as u32, Relaxed),
                    4 => peer.sent.0.base.store(word, Relaxed),
                    5 => peer.sent.0.urgent.store(word, Relaxed),
                    6 => own.sent.0.bytes.store(word, Relaxed),
                    7 => own.taken.0.bytes.store(word, Relaxed),
                    8 => peer.kept.0.receive_limit.store(word as u32, Relaxed),
                    9 => own.notifier.0.wants.store(word as u32, Relaxed),
                    10 => {
                        let most = word as usize % out.len();
                        end.recv(NOW, &mut out[..most]);
                    }
                    11 => {
                        end.send(NOW, &out[..word as usize % out.len()]);
                        end.mark_urgent();
                    }
                    12 => {
                        end.peek(word as usize % out.len(), &mut out[..100]);
                        end.take_urgent();
                    }
                    13 => {
                        let _ = end.publish(NOW);
                    }
                    14 => end = Local::new(Arc::clone(&rings), Side::Opener),
                    _ => end.options().urgent_inline = word & 1 != 0,
                }
                end.look(NOW);
                assert!(end.readable() <= RING_MIN && end.send_space() <= RING_MIN);
                let _ = (
                    end.inquiry(),
                    end.is_readable(),
                    end.poll_writable(),
                    end.tcp_info(),
                );
            }
        });
}

/// Whoever shares the memory writes over what a peer's last holder, or the server for it, has shown there.
#[test]
fn a_peer_that_the_server_knows_to_have_ended_does_not_come_back() {
    for shown in [0, flags::CLOSED, flags::FIN, flags::ACTIVE | flags::FIN] {
        let rings = memory(RING_MIN);
        let mut a = Local::new(Arc::clone(&rings), Side::Opener);
        let mut b = Local::new(Arc::clone(&rings), Side::Accepter);
        a.send(NOW, b"last words");
        a.close(NOW);
        let _ = a.publish(NOW);
        rings.ends().opener.sent.0.flags.store(shown, Relaxed);
        b.look(NOW);
        assert!(!b.is_closed(), "{shown}");
        let events = b.note_peer_end(NOW);
        assert!(events.contains(Events::ERROR), "{shown}");
        assert!(b.is_closed() && b.is_receive_shut() && b.error().is_some());
        assert_eq!(b.send(NOW, b"x"), 0);
        assert_eq!(b.note_peer_end(NOW), Events::NONE);
    }
    let (mut a, mut b) = pair();
    a.send(NOW, b"last words");
    a.close(NOW);
    let _ = a.publish(NOW);
    b.note_peer_end(NOW);
    assert_eq!(b.error(), None, "an end that shows is an end as any other");
    assert_eq!(read_all(&mut b), b"last words");
    assert!(b.has_read_end());
}

#[test]
fn a_peer_that_claims_the_impossible_ends_the_stream_with_an_error() {
    let rings = memory(RING_MIN);
    let mut end = Local::new(Arc::clone(&rings), Side::Opener);
    let claimed = RING_MIN as u64 + 1;
    rings.ends().accepter.sent.0.shown.store(claimed, Relaxed);
    assert_eq!(end.look(NOW), Events::ERROR | Events::CLOSED);
    assert_eq!(end.take_error(), Some(Error::Aborted));
    assert!(end.is_closed() && end.readable() == 0);
}

/// One side of the stress test: a thread whose notifier is a channel with room for one message.
struct Sleeper {
    end: Local,
    rings: Receiver<()>,
    other: SyncSender<()>,
}

impl Sleeper {
    /// Repeats a call until it succeeds; sleeps only if a look after the request finds nothing.
    fn until<T>(&mut self, mut call: impl FnMut(&mut Local) -> Option<T>) -> T {
        loop {
            self.end.look(NOW);
            let done = call(&mut self.end);
            if self.end.publish(NOW).is_some() {
                // Full: it rings already.
                let _ = self.other.try_send(());
            }
            if let Some(done) = done {
                return done;
            }
            self.end.arm(WakeBy::Notifier);
            if self.end.look(NOW) != Events::NONE {
                continue;
            }
            match self.rings.recv_timeout(Duration::from_secs(20)) {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => panic!("a wake-up was lost"),
                Err(RecvTimeoutError::Disconnected) => panic!("the peer is gone"),
            }
        }
    }
}

#[test]
fn who_sleeps_on_its_word_needs_no_notifier() {
    let (mut a, b) = pair();
    b.give_to(7);
    b.arm(WakeBy::Word);
    let spec = b.wake_request();
    let still = || std::iter::once(spec.word());
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            while !b.was_rung() {
                let _ = word::sleep_on(still());
            }
        });
        a.send(NOW, b"x");
        let wake = a.publish(NOW);
        assert_eq!(wake, Some(Wake::Word(7)));
        assert_eq!(wake.and_then(Wake::notifier), None);
        sleeper.join().unwrap();
    });
    drop(b);
    assert_eq!(word::sleep_on(still()), Err(Errno::AGAIN), "fulfilled");
}

#[test]
fn the_next_holder_wake_requests_anew() {
    let (mut a, b) = pair();
    b.give_to(7);
    b.arm(WakeBy::Word);
    b.give_to(8);
    b.arm(WakeBy::Notifier);
    a.send(NOW, b"x");
    assert_eq!(a.publish(NOW), Some(Wake::Notifier(8)));
}

/// Sleeps on the word of `end` unless a look after the request finds something.
fn sleep_on_word(end: &mut Local) {
    end.arm(WakeBy::Word);
    if end.look(NOW) == Events::NONE {
        let spec = end.wake_request();
        let slept = word::sleep_on(std::iter::once(spec.word()));
        assert!(matches!(slept, Ok(()) | Err(Errno::AGAIN)), "{slept:?}");
    }
}

#[test]
fn no_wake_up_is_lost_on_words() {
    const ROUNDS: u32 = 20_000;
    let (a, b) = pair();
    a.give_to(2);
    b.give_to(3);
    let play = |mut end: Local, mut is_turn: bool| {
        let mut got = 0;
        loop {
            if is_turn {
                end.send(NOW, b"x");
                let _ = end.publish(NOW);
            }
            if got == ROUNDS {
                return;
            }
            while end.recv(NOW, &mut [0; 1]) == 0 {
                end.look(NOW);
                if end.readable() == 0 {
                    sleep_on_word(&mut end);
                }
            }
            got += 1;
            is_turn = true;
        }
    };
    let (done, is_done) = sync_channel(2);
    for (end, is_turn) in [(a, true), (b, false)] {
        let done = done.clone();
        std::thread::spawn(move || {
            play(end, is_turn);
            done.send(()).unwrap();
        });
    }
    for _ in 0..2 {
        let ended = is_done.recv_timeout(Duration::from_secs(60));
        ended.expect("no wake-up is lost");
    }
}

#[test]
fn no_wake_up_is_lost() {
    const BYTES: usize = 24 << 20;
    let (a, b) = pair();
    a.give_to(2);
    b.give_to(3);
    let (ring_a, rung_a) = sync_channel(1);
    let (ring_b, rung_b) = sync_channel(1);
    let mut writer = Sleeper {
        end: a,
        rings: rung_a,
        other: ring_b,
    };
    let mut reader = Sleeper {
        end: b,
        rings: rung_b,
        other: ring_a,
    };
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sent = 0;
            // Sizes that make both sides wait for each other, with replies in between.
            for round in 0.. {
                let size = [1, 700, RING_MIN, 3 * RING_MIN][round % 4].min(BYTES - sent);
                let bytes: Vec<u8> = (sent..sent + size).map(|i| (i % 253) as u8).collect();
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let count = writer.until(|end| Some(end.send(NOW, rest)).filter(|n| *n > 0));
                    rest = &rest[count..];
                }
                sent += size;
                writer.until(|end| (end.recv(NOW, &mut [0; 1]) == 1).then_some(()));
                if sent == BYTES {
                    break;
                }
            }
            is_done.store(true, SeqCst);
        });
        scope.spawn(|| {
            let mut received = 0;
            let mut round = 0;
            while received < BYTES {
                let size = [1, 700, RING_MIN, 3 * RING_MIN][round % 4].min(BYTES - received);
                let end = received + size;
                let mut buffer = vec![0; 5000];
                while received < end {
                    let most = buffer.len().min(end - received);
                    let count = reader.until(|local| {
                        Some(local.recv(NOW, &mut buffer[..most])).filter(|count| *count > 0)
                    });
                    for byte in &buffer[..count] {
                        assert_eq!(*byte, (received % 253) as u8);
                        received += 1;
                    }
                }
                reader.until(|end| (end.send(NOW, b"k") == 1).then_some(()));
                round += 1;
            }
        });
    });
    assert!(is_done.load(SeqCst));
}

/// A notifier as fast as memory, so that every order of requests and publications occurs.
fn sleep_until_rung(notifier: &AtomicBool) {
    let start = std::time::Instant::now();
    for turn in 1_u32.. {
        if notifier.swap(false, SeqCst) {
            return;
        }
        if turn.is_multiple_of(1000) {
            std::thread::yield_now();
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "a wake-up was lost"
            );
        }
        std::hint::spin_loop();
    }
}

#[test]
fn a_peer_sees_the_spec_or_the_wisher_what_was_sent() {
    const ROUNDS: u32 = 30_000;
    let (a, b) = pair();
    a.give_to(2);
    b.give_to(3);
    let notifiers = [AtomicBool::new(false), AtomicBool::new(false)];
    let play = |mut end: Local, own: &AtomicBool, other: &AtomicBool, mut is_turn: bool| {
        let ring = |end: &mut Local| {
            if end.publish(NOW).is_some() {
                other.store(true, SeqCst);
            }
        };
        for _ in 0..ROUNDS {
            if is_turn {
                end.send(NOW, b"x");
                ring(&mut end);
            }
            is_turn = true;
            loop {
                end.look(NOW);
                if end.recv(NOW, &mut [0; 1]) == 1 {
                    break;
                }
                end.arm(WakeBy::Notifier);
                if end.look(NOW) == Events::NONE {
                    sleep_until_rung(own);
                }
            }
        }
        end.send(NOW, b"x");
        ring(&mut end);
    };
    std::thread::scope(|scope| {
        let [first, second] = &notifiers;
        scope.spawn(|| play(a, first, second, true));
        scope.spawn(|| play(b, second, first, false));
    });
}
