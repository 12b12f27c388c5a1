//! Which rulesets have an effect on sockets, as `nft` sets them up. Needs root.

use std::process::Command;

use super::*;
use crate::testing::{in_fresh_namespace, run};

fn nft(command: &str) {
    let output = run(Command::new("nft").arg(command));
    assert!(output.status.success(), "{command}: {output:?}");
}

fn has_rules() -> bool {
    Nftables::open().unwrap().has_rules().unwrap()
}

#[test]
fn only_rules_that_sockets_meet_count() {
    in_fresh_namespace(|| {
        assert!(!has_rules());
        for (chain, counts) in [
            ("inet t i { type filter hook input priority 0; }", true),
            ("ip t o { type filter hook output priority 0; }", true),
            ("ip6 t p { type nat hook postrouting priority 0; }", true),
            ("inet t f { type filter hook forward priority 0; }", false),
            ("inet t plain", false),
        ] {
            let name: Vec<&str> = chain.split(' ').take(3).collect();
            let (table, name) = (name[..2].join(" "), name.join(" "));
            nft(&format!("add table {table}"));
            nft(&format!("add chain {chain}"));
            assert!(!has_rules(), "{chain} is empty");
            nft(&format!("add rule {name} tcp dport 1 accept"));
            assert_eq!(has_rules(), counts, "{chain}");
            nft("flush ruleset");
            assert!(!has_rules());
        }
        nft("add table inet t");
        nft("add chain inet t i { type filter hook input priority 0; policy drop; }");
        assert!(has_rules());
    });
}

#[test]
fn changes_are_events() {
    in_fresh_namespace(|| {
        let mut nftables = Nftables::open().unwrap();
        let is_readable = |nftables: &Nftables| {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let second = Timespec {
                tv_sec: 0,
                tv_nsec: 100_000_000,
            };
            poll(&mut [PollFd::new(nftables, PollFlags::IN)], Some(&second)).unwrap() == 1
        };
        assert!(!is_readable(&nftables));
        nft("add table inet t");
        assert!(is_readable(&nftables));
        nftables.drain();
        assert!(!is_readable(&nftables));
    });
}

/// The kernel is trusted, but not the parser, which is of another crate.
#[test]
fn no_bytes_make_the_parser_panic() {
    portolan_fuzz::check!(3000)
        .with_type::<Vec<u8>>()
        .for_each(|bytes| {
            for message in messages(bytes) {
                is_rule(message.body);
                error_of(message.body);
            }
            is_rule(bytes);
        });
}
