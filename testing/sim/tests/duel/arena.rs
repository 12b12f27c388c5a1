//! The network between the ends: runs a program, step by step, and checks both ends after each.

use core::time::Duration;

use portolan_sim::{PORT_A, PORT_B, Packet, START, Side, cut, merge};
use portolan_tcp::{Codepoint, CongestionKind, Connection, StateName, capsule, reset_for};
use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader, Timestamps};

use crate::end::End;
use crate::program::{Setup, Step, Who};

/// More segments than can be due at one time, given the largest buffers here.
const BURST: usize = 20_000;

pub(crate) struct Arena {
    pub now: Instant,
    pub a: End,
    pub b: End,
    pub gro: bool,
    crossing: bool,
    start: SeqNum,
    /// An attacker on the path may forge any segment.
    pub on_path: bool,
    /// The user has set time-outs, so that one of them is not a fault.
    pub impatient: bool,
    /// The user has aborted an end, or closed it in a way that may lose data.
    pub cut_short: bool,
}

impl Arena {
    pub(crate) fn new(setup: &Setup, on_path: bool) -> Arena {
        let mut arena = Arena {
            now: START,
            a: End::new(Side::A, setup.a.config()),
            b: End::new(Side::B, setup.b.config()),
            gro: setup.gro,
            crossing: setup.crossing,
            start: SeqNum(0) + setup.start as u32,
            on_path,
            impatient: false,
            cut_short: false,
        };
        arena.open(Side::A, PORT_A, PORT_B);
        if setup.crossing {
            arena.open(Side::B, PORT_B, PORT_A);
        }
        arena.flush_all();
        if setup.established {
            arena.calm(3);
        }
        arena
    }

    fn open(&mut self, side: Side, local: u16, remote: u16) {
        let (now, iss) = (self.now, self.iss(side));
        let end = self.end(side);
        end.connection = Some(Connection::connect(&end.config, local, remote, iss, now));
    }

    fn iss(&self, side: Side) -> SeqNum {
        match side {
            Side::A => self.start,
            Side::B => self.start + 0x7000_0000,
        }
    }

    pub(crate) fn end(&mut self, side: Side) -> &mut End {
        match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        }
    }

    pub(crate) fn run(&mut self, steps: &[Step]) {
        for step in steps {
            self.apply(step);
            self.flush_all();
            self.check();
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Write { who, bytes } => self.write(who.side(), bytes.into()),
            Step::Read { who, bytes } => self.read(who.side(), bytes.into()),
            Step::ShutdownSend(who) => self.shutdown_send(who.side()),
            Step::ShutdownReceive(who) => self.shutdown_receive(who.side()),
            Step::Close(who) => self.close(who.side()),
            Step::Abort(who) => self.abort(who.side()),
            Step::Deliver { who, place } => {
                if let Some(packet) = self.take(who, place) {
                    self.deliver(who.side().other(), vec![packet]);
                }
            }
            Step::DeliverAll(who) => self.deliver_all(who.side()),
            Step::Calm(times) => self.calm(times % 8),
            Step::Drop { who, place } => drop(self.take(who, place)),
            Step::DropAll(who) => self.end(who.side()).flying.clear(),
            Step::Duplicate { who, place } => {
                if let Some(packet) = self.take(who, place) {
                    let flying = &mut self.end(who.side()).flying;
                    flying.push(packet.clone());
                    flying.push(packet);
                }
            }
            Step::Mark { who, place } => {
                if let Some(mut packet) = self.take(who, place) {
                    if packet.codepoint != Codepoint::NotEct {
                        packet.codepoint = Codepoint::Ce;
                    }
                    self.end(who.side()).flying.push(packet);
                }
            }
            Step::Wait(millis) => {
                self.now += Duration::from_millis(u64::from(millis).pow(2) / 8);
                self.run_timers();
            }
            Step::Timer(who) => {
                if let Some(at) = self.deadline(who.side()) {
                    self.now = self.now.max(at);
                    self.run_timers();
                }
            }
            Step::Migrate(who) => self.migrate(who.side()),
            Step::Option { who, kind, value } => self.set_option(who.side(), kind, value),
            Step::Forge {
                who,
                kind,
                offset,
                bytes,
                flags,
            } => self.forge(who.side(), kind, offset, bytes, flags),
            Step::Corrupt {
                who,
                place,
                field,
                value,
            } => self.corrupt(who, place, field, value),
        }
    }

    // ---- the users ----

    pub(crate) fn write(&mut self, side: Side, bytes: usize) {
        let now = self.now;
        let end = self.end(side);
        let data: Vec<u8> = (end.written..end.written + bytes as u64)
            .map(|position| end.byte(position))
            .collect();
        if let Some(connection) = &mut end.connection
            && !end.closed
        {
            end.written += connection.send(now, &data) as u64;
        }
    }

    pub(crate) fn read(&mut self, side: Side, bytes: usize) {
        let now = self.now;
        let end = self.end(side);
        let mut buffer = vec![0; bytes];
        let Some(connection) = &mut end.connection else {
            return;
        };
        if end.closed {
            return;
        }
        let count = connection.recv(now, &mut buffer);
        let from = end.read;
        end.read += count as u64;
        if self.on_path {
            return;
        }
        let peer = self.end(side.other());
        for (byte, position) in buffer[..count].iter().zip(from..) {
            assert!(position < peer.written, "a byte that nobody wrote");
            assert_eq!(*byte, peer.byte(position), "byte {position} of {side:?}");
        }
    }

    pub(crate) fn shutdown_send(&mut self, side: Side) {
        let now = self.now;
        let end = self.end(side);
        if let Some(connection) = &mut end.connection
            && !end.closed
        {
            let opening = connection.state() == StateName::SynSent;
            connection.shutdown_send(now);
            self.cut_short |= opening;
        }
    }

    fn shutdown_receive(&mut self, side: Side) {
        if let Some(connection) = &mut self.end(side).connection {
            connection.shutdown_receive();
            // Data that arrives after both directions are shut resets the stream.
            self.cut_short = true;
        }
    }

    pub(crate) fn close(&mut self, side: Side) {
        let now = self.now;
        let end = self.end(side);
        if let Some(connection) = &mut end.connection
            && !end.closed
        {
            end.closed = true;
            connection.close(now);
            self.cut_short = true;
        }
    }

    fn abort(&mut self, side: Side) {
        let now = self.now;
        let end = self.end(side);
        if let Some(connection) = &mut end.connection {
            end.closed = true;
            connection.abort(now);
            self.cut_short = true;
        }
    }

    fn migrate(&mut self, side: Side) {
        let end = self.end(side);
        let Some(connection) = &mut end.connection else {
            return;
        };
        let capsule = capsule::to_bytes(connection);
        let figures = connection.tcp_info();
        let bound = figures.send_queue + (16 << 20) + 8192 * 40;
        assert!(capsule.len() <= bound, "{} bytes", capsule.len());
        let decoded: Connection = capsule::from_bytes(&capsule).expect("and decode");
        assert_eq!(decoded.validate(), Ok(()), "{connection:?}");
        *connection = decoded;
    }

    fn set_option(&mut self, side: Side, kind: u8, value: u16) {
        let time = Duration::from_millis(u64::from(value));
        let end = self.end(side);
        let Some(connection) = &mut end.connection else {
            return;
        };
        match kind % 12 {
            0 => connection.options().nodelay ^= true,
            1 => connection.options().cork ^= true,
            2 => connection.ack_quickly(),
            3 => connection.options().user_timeout = Some(time),
            4 => connection.options().window_clamp = Some(value.into()),
            5 => connection.set_send_buffer(value.into()),
            6 => connection.set_receive_buffer(value.into()),
            7 => connection.options().max_segment = Some(value.max(1)),
            8 => connection.options().receive_low_water = value.into(),
            9 => connection.options().max_pacing = Some(1_000_000 + u64::from(value)),
            10 => {
                let kinds = CongestionKind::ALL;
                connection.set_congestion(kinds[usize::from(value) % kinds.len()]);
            }
            _ => {
                let keepalive = &mut connection.options().keepalive;
                keepalive.enabled ^= true;
                // The least that a socket accepts is a second.
                keepalive.idle = time + Duration::from_secs(1);
                keepalive.interval = time + Duration::from_secs(1);
            }
        }
        self.impatient |= matches!(kind % 12, 3 | 11);
    }

    // ---- the path ----

    fn take(&mut self, who: Who, place: u8) -> Option<Packet> {
        let flying = &mut self.end(who.side()).flying;
        (!flying.is_empty()).then(|| flying.remove(usize::from(place) % flying.len()))
    }

    pub(crate) fn deliver_all(&mut self, from: Side) {
        let packets = core::mem::take(&mut self.end(from).flying);
        self.deliver(from.other(), packets);
    }

    pub(crate) fn deliver(&mut self, to: Side, packets: Vec<Packet>) {
        let (end, peer) = match to {
            Side::A => (&mut self.a, &self.b),
            Side::B => (&mut self.b, &self.a),
        };
        for packet in &packets {
            end.note_arrived(peer, packet);
        }
        let packets = if self.gro { merge(packets) } else { packets };
        for packet in &packets {
            self.inject(to, packet);
        }
    }

    /// Delivers a packet to the host of `to`.
    pub(crate) fn inject(&mut self, to: Side, packet: &Packet) {
        let (now, iss, crossing) = (self.now, self.iss(to), self.crossing);
        let end = self.end(to);
        match &mut end.connection {
            Some(connection) if !connection.is_closed() => {
                connection.on_marked_segment(
                    now,
                    packet.codepoint,
                    &packet.header,
                    &packet.payload,
                );
            }
            None if opens(packet) && !crossing => {
                let syn = &packet.header;
                end.connection = Some(Connection::accept(&end.config, syn, iss, now));
            }
            _ => {
                if let Some(header) = reset_for(&packet.header, packet.payload.len()) {
                    end.flying.push(Packet::new(header, Vec::new()));
                }
            }
        }
        self.flush(to);
        self.check();
    }

    fn calm(&mut self, times: u8) {
        for _ in 0..times {
            self.now += Duration::from_millis(1);
            self.run_timers();
            self.deliver_all(Side::A);
            self.read(Side::B, 1 << 16);
            self.flush_all();
            self.deliver_all(Side::B);
            self.read(Side::A, 1 << 16);
            self.flush_all();
        }
    }

    pub(crate) fn deadline(&mut self, side: Side) -> Option<Instant> {
        self.end(side)
            .connection
            .as_ref()
            .and_then(Connection::deadline)
    }

    /// Runs the timers that are due. Each call must make progress: no timer may stay due.
    pub(crate) fn run_timers(&mut self) {
        let now = self.now;
        for side in [Side::A, Side::B] {
            for round in 0.. {
                if self.deadline(side).is_none_or(|at| at > now) {
                    break;
                }
                assert!(round < 8, "a busy loop: {:?}", self.end(side).connection);
                if let Some(connection) = &mut self.end(side).connection {
                    connection.on_timer(now);
                }
                self.flush(side);
            }
        }
    }

    pub(crate) fn flush_all(&mut self) {
        self.flush(Side::A);
        self.flush(Side::B);
    }

    fn flush(&mut self, side: Side) {
        let (now, on_path) = (self.now, self.on_path);
        let end = self.end(side);
        for count in 0.. {
            assert!(count < BURST, "transmits for ever: {:?}", end.connection);
            let Some(connection) = &mut end.connection else {
                return;
            };
            let Some(segment) = connection.transmit(now) else {
                break;
            };
            let packets = cut(&segment);
            for packet in packets {
                if !on_path {
                    end.check_window(&packet);
                    end.note_sent(&packet);
                }
                end.flying.push(packet);
            }
        }
        if let Some(connection) = &mut end.connection {
            connection.events();
        }
    }

    /// Checks the invariants that hold after every step.
    pub(crate) fn check(&self) {
        for end in [&self.a, &self.b] {
            let Some(connection) = &end.connection else {
                continue;
            };
            assert_eq!(connection.validate(), Ok(()), "{connection:?}");
            let figures = connection.tcp_info();
            assert!(figures.receive_queue <= 1 << 20, "{figures:?}");
            assert!(
                figures.unacknowledged as usize <= figures.send_queue + 1,
                "{figures:?}"
            );
        }
    }

    // ---- strangers ----

    fn forge(&mut self, to: Side, kind: u8, offset: i32, bytes: u8, flags: u8) {
        let mut flags = TcpFlags(flags & 0x3f);
        let peer = self.end(to.other());
        let (highest, ports) = (peer.highest, ports(to));
        let end = self.end(to);
        let (Some(next), Some(edge), Some(highest)) = (end.acknowledged, end.offered, highest)
        else {
            return;
        };
        let mine = end.highest.unwrap_or(SeqNum(0));
        let far = offset.unsigned_abs() % (1 << 30);
        let mut payload = vec![0xee; bytes.into()];
        let mut ack = mine + offset as u32;
        let seq = if self.on_path {
            ack = mine + (offset >> 20) as u32;
            next + (offset as i16) as u32
        } else {
            match kind % 4 {
                // Beyond the window, or long before it.
                0 => edge.max(highest) + 1 + far,
                1 => {
                    payload.truncate(100);
                    next - (1 << 20) - far
                }
                // A reset in the window, but not at its edge (RFC 5961 §3.2).
                2 => {
                    flags = TcpFlags::RST;
                    highest.max(next) + 1 + far
                }
                // An acknowledgement of data that was never sent (RFC 5961 §5.2).
                _ => {
                    flags = TcpFlags::ACK;
                    payload.clear();
                    ack = mine + 1 + far;
                    highest
                }
            }
        };
        let mut header = TcpHeader {
            source_port: ports.0,
            destination_port: ports.1,
            seq,
            ack,
            flags,
            window: offset as u16,
            ..TcpHeader::default()
        };
        if kind & 64 != 0 {
            header.options.timestamps = Some(Timestamps {
                value: self.now.as_millis() as u32 + u32::from(bytes),
                echo: self.now.as_millis() as u32,
            });
        }
        self.inject(to, &Packet::new(header, payload));
    }

    fn corrupt(&mut self, who: Who, place: u8, field: u8, value: i16) {
        if !self.on_path {
            return;
        }
        let Some(mut packet) = self.take(who, place) else {
            return;
        };
        let (header, by) = (&mut packet.header, value as u32);
        match field % 9 {
            0 => header.seq += by,
            1 => header.ack += by,
            2 => header.window = value as u16,
            3 => header.flags.0 ^= value as u8,
            4 => header.options.timestamps = None,
            5 => {
                if let Some(field) = &mut header.options.timestamps {
                    field.value = field.value.wrapping_add(by);
                }
            }
            6 => {
                if let Some(field) = &mut header.options.timestamps {
                    field.echo = field.echo.wrapping_add(by);
                }
            }
            7 => {
                for block in &mut header.options.sack {
                    block.end += by;
                }
            }
            _ => packet.payload.truncate(value as usize & 0xff),
        }
        self.end(who.side()).flying.push(packet);
    }
}

/// Returns true for a SYN, whatever its ECN flags.
fn opens(packet: &Packet) -> bool {
    let congestion = TcpFlags::ECE.with(TcpFlags::CWR).0;
    packet.header.flags.0 & !congestion == TcpFlags::SYN.0
}

fn ports(to: Side) -> (u16, u16) {
    match to {
        Side::A => (PORT_B, PORT_A),
        Side::B => (PORT_A, PORT_B),
    }
}
