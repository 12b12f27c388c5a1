use std::vec;
use std::vec::Vec;

use super::*;

fn header(flags: TcpFlags, options: TcpOptions) -> TcpHeader {
    TcpHeader {
        source_port: 40000,
        destination_port: 80,
        seq: SeqNum(0xfedc_ba98),
        ack: SeqNum(7),
        flags,
        window: 501,
        urgent: 0,
        options,
    }
}

fn emit(header: &TcpHeader) -> Vec<u8> {
    let mut bytes = vec![0xee; header.header_len()];
    assert_eq!(header.emit(&mut bytes), bytes.len());
    bytes
}

fn syn_options() -> TcpOptions {
    TcpOptions {
        demux: None,
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some(Timestamps { value: 1, echo: 2 }),
        sack: ArrayVec::new(),
        fast_open: None,
    }
}

fn blocks(count: u32) -> ArrayVec<SackBlock, 4> {
    (0..count)
        .map(|n| SackBlock {
            start: SeqNum(n * 100),
            end: SeqNum(n * 100 + 50),
        })
        .collect()
}

#[test]
fn a_syn_has_linuxs_option_layout() {
    let bytes = emit(&header(TcpFlags::SYN, syn_options()));
    let expected = [
        2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2, 1, 3, 3, 7,
    ];
    assert_eq!(bytes[HEADER_LEN..], expected);
}

#[test]
fn headers_come_back_as_they_were_emitted() {
    let no_timestamps = TcpOptions {
        timestamps: None,
        ..syn_options()
    };
    let timestamps_only = TcpOptions {
        timestamps: syn_options().timestamps,
        ..TcpOptions::default()
    };
    let sack = TcpOptions {
        sack: blocks(3),
        ..timestamps_only.clone()
    };
    let many_sack = TcpOptions {
        sack: blocks(4),
        ..TcpOptions::default()
    };
    let cases = [
        (TcpFlags::SYN, syn_options()),
        (TcpFlags::SYN, no_timestamps),
        (TcpFlags::ACK, timestamps_only),
        (TcpFlags::ACK, sack),
        (TcpFlags::ACK.with(TcpFlags::FIN), many_sack),
        (TcpFlags::RST, TcpOptions::default()),
    ];
    for (flags, options) in cases {
        let header = header(flags, options);
        let bytes = emit(&header);
        assert_eq!(TcpHeader::parse(&bytes), Ok((header, bytes.len())));
    }
}

#[test]
fn etherparse_reads_the_same_header_and_options() {
    use etherparse::TcpOptionElement as Element;
    let bytes = emit(&header(TcpFlags::SYN.with(TcpFlags::ACK), syn_options()));
    let oracle = etherparse::TcpHeaderSlice::from_slice(&bytes).unwrap();
    assert!(oracle.syn() && oracle.ack() && !oracle.fin() && !oracle.rst());
    assert_eq!(oracle.sequence_number(), 0xfedc_ba98);
    assert_eq!(oracle.window_size(), 501);
    let options: Vec<_> = oracle.options_iterator().map(Result::unwrap).collect();
    let expected = [
        Element::MaximumSegmentSize(1460),
        Element::SelectiveAcknowledgementPermitted,
        Element::Timestamp(1, 2),
        Element::Noop,
        Element::WindowScale(7),
    ];
    assert_eq!(options, expected);
}

#[test]
fn sack_blocks_beyond_the_room_are_left_out() {
    let options = TcpOptions {
        sack: blocks(4),
        ..syn_options()
    };
    let header = header(TcpFlags::SYN, options);
    assert!(header.header_len() <= MAX_HEADER_LEN);
    let (parsed, _) = TcpHeader::parse(&emit(&header)).unwrap();
    assert_eq!(parsed.options.sack, blocks(2));
}

#[test]
fn handshake_options_count_in_a_syn_only() {
    let (parsed, _) = TcpHeader::parse(&emit(&header(TcpFlags::ACK, syn_options()))).unwrap();
    let expected = TcpOptions {
        timestamps: syn_options().timestamps,
        ..TcpOptions::default()
    };
    assert_eq!(parsed.options, expected);
}

#[test]
fn an_option_that_does_not_fit_ends_the_options() {
    let mut bytes = emit(&header(TcpFlags::SYN, syn_options()));
    bytes[HEADER_LEN + 7] = 99;
    let (parsed, _) = TcpHeader::parse(&bytes).unwrap();
    assert_eq!(
        (parsed.options.mss, parsed.options.sack_permitted),
        (Some(1460), true)
    );
    assert_eq!(
        (parsed.options.timestamps, parsed.options.window_scale),
        (None, None)
    );
    bytes[HEADER_LEN + 1] = 0;
    let (parsed, _) = TcpHeader::parse(&bytes).unwrap();
    assert_eq!(parsed.options, TcpOptions::default());
}

#[test]
fn a_data_offset_outside_the_segment_is_malformed() {
    let mut bytes = emit(&header(TcpFlags::ACK, TcpOptions::default()));
    bytes[12] = 0x40;
    assert_eq!(TcpHeader::parse(&bytes), Err(Malformed));
    bytes[12] = 0x60;
    assert_eq!(TcpHeader::parse(&bytes), Err(Malformed));
    assert_eq!(TcpHeader::parse(&bytes[..19]), Err(Malformed));
}

#[test]
fn no_bytes_make_the_parser_panic_and_what_parses_can_be_emitted() {
    portolan_fuzz::check!(2000).for_each(|bytes| {
        if let Ok((header, header_len)) = TcpHeader::parse(bytes) {
            assert!(header_len <= bytes.len());
            let again = emit(&header);
            assert!(again.len() <= MAX_HEADER_LEN);
            assert!(TcpHeader::parse(&again).is_ok());
        }
    });
}

#[test]
fn a_fast_open_cookie_travels_in_syns_only_and_is_padded() {
    for length in [0, 4, 8, 16] {
        let options = TcpOptions {
            fast_open: Some((0..length).collect()),
            ..syn_options()
        };
        let bytes = emit(&header(TcpFlags::SYN, options.clone()));
        assert!(bytes.len().is_multiple_of(4) && bytes.len() <= MAX_HEADER_LEN);
        let (parsed, _) = TcpHeader::parse(&bytes).unwrap();
        assert_eq!(parsed.options, options);
        let plain = emit(&header(TcpFlags::ACK, options));
        let (parsed, _) = TcpHeader::parse(&plain).unwrap();
        assert_eq!(parsed.options.fast_open, None);
    }
}

#[test]
fn a_fast_open_cookie_of_a_wrong_length_is_none() {
    for length in [1_u8, 2, 3, 5, 17, 18] {
        let mut bytes = emit(&header(TcpFlags::SYN, TcpOptions::default()));
        bytes.extend([34, 2 + length]);
        bytes.extend(vec![7; usize::from(length)]);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes[12] = ((bytes.len() / 4) << 4) as u8;
        let (parsed, _) = TcpHeader::parse(&bytes).unwrap();
        assert_eq!(parsed.options.fast_open, None, "{length}");
    }
}
