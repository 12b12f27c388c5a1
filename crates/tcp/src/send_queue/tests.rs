//! A queue of copied bytes and chunks behaves like a plain list of bytes, and never returns a segment in more than two
//! slices.

use super::*;

/// Larger than any segment.
const SEGMENT: usize = 65_483;

fn chunk(length: usize, first: u8) -> Chunk {
    let mut chunk = Chunk::new();
    chunk.resize(length);
    for (index, byte) in chunk.bytes_mut().iter_mut().enumerate() {
        *byte = first.wrapping_add(index as u8);
    }
    chunk
}

fn bytes(queue: &SendQueue, offset: usize, length: usize) -> Vec<u8> {
    queue.slices(offset, length).concat()
}

/// Marsaglia's xorshift.
fn chance(state: &mut u32, limit: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    *state as usize % limit
}

#[test]
fn it_is_what_a_plain_list_of_bytes_would_be() {
    let mut queue = SendQueue::default();
    let mut list: VecDeque<u8> = VecDeque::new();
    let mut state = 0x9e37_79b9_u32;
    let mut in_place = 0;
    for step in 0..4_000 {
        match chance(&mut state, 4) {
            0 => {
                let data = vec![step as u8; chance(&mut state, 90_000)];
                queue.push(&data);
                list.extend(&data);
            }
            1 => {
                let chunk = chunk(chance(&mut state, Chunk::CAPACITY + 1), step as u8);
                list.extend(chunk.bytes());
                in_place += usize::from(queue.push_chunk(chunk) != Placed::Copied);
            }
            _ => {
                let count = chance(&mut state, 150_000).min(list.len());
                queue.consume(count);
                list.drain(..count);
            }
        }
        assert_eq!((queue.len(), queue.span()), (list.len(), list.len()));
        if !list.is_empty() {
            let offset = chance(&mut state, list.len());
            let length = chance(&mut state, SEGMENT + 1).min(list.len() - offset);
            let expected = list.range(offset..offset + length);
            assert!(bytes(&queue, offset, length).iter().eq(expected), "{step}");
        }
    }
    assert!(in_place > 300, "{in_place}");
}

#[test]
fn a_full_chunk_is_sent_from_where_it_lies() {
    let mut queue = SendQueue::default();
    let chunk = chunk(Chunk::CAPACITY, 1);
    let place = chunk.bytes().as_ptr();
    assert_eq!(queue.push_chunk(chunk), Placed::InPlace { copied: 0 });
    assert_eq!(queue.slices(0, SEGMENT)[0].as_ptr(), place);
}

#[test]
fn a_short_chunk_is_copied() {
    let mut queue = SendQueue::default();
    assert_eq!(queue.push_chunk(chunk(LEAST - 1, 0)), Placed::Copied);
    assert!(queue.chunks.is_empty());
}

#[test]
fn it_travels_as_bytes() {
    let mut queue = SendQueue::default();
    queue.push(b"before");
    queue.push_chunk(chunk(LEAST, 3));
    queue.push(b"behind");
    queue.consume(2);
    let mut out = Writer::new(0);
    queue.put(&mut out);
    let capsule = out.finish();
    let mut reader = Reader::new(&capsule).unwrap();
    let other = SendQueue::take(&mut reader).unwrap();
    assert_eq!(other.len(), queue.len());
    let all = |queue: &SendQueue| {
        [
            bytes(queue, 0, SEGMENT),
            bytes(queue, SEGMENT, queue.len() - SEGMENT),
        ]
        .concat()
    };
    assert!(all(&other) == all(&queue));
}

#[test]
fn a_chunk_shows_nothing_of_its_last_use() {
    drop(chunk(Chunk::CAPACITY, 9));
    let mut next = Chunk::new();
    assert!(next.bytes().is_empty());
    next.resize(Chunk::CAPACITY);
    assert!(next.bytes().iter().all(|byte| *byte == 0));
}
