//! What is written to a group's files; the groups are plain directories here.

use std::process;

use super::*;

const TID: u32 = 4711;

/// A directory like a cgroup of version 2.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str, controllers: &str, for_children: &str) -> Tree {
        let path = std::env::temp_dir().join(format!("portolan-share-{}-{name}", process::id()));
        fs::create_dir_all(&path).unwrap();
        let tree = Tree(path);
        tree.put("cgroup.controllers", controllers);
        tree.put("cgroup.subtree_control", for_children);
        tree
    }

    fn put(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).unwrap();
    }

    fn has(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap_or_default()
    }

    fn childs(&self, tid: u32, file: &str) -> String {
        self.has(&format!("{}/{file}", name(tid)))
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn give_below(tree: &Tree, tid: u32) -> Share {
    let share = second::plan_below(&tree.0, tid).unwrap();
    share.begin().unwrap();
    share
}

#[test]
fn a_thread_has_a_threaded_group_below_its_own_and_goes_back_in_the_end() {
    let tree = Tree::new("goes", "cpuset cpu memory\n", "");
    let share = give_below(&tree, TID);
    assert_eq!(tree.childs(TID, "cgroup.type"), "threaded");
    assert_eq!(tree.childs(TID, "cgroup.threads"), TID.to_string());
    assert_eq!(tree.has("cgroup.subtree_control"), "+cpu");
    share.set_rate(300_000, 10_000).unwrap();
    assert_eq!(tree.childs(TID, "cpu.weight"), "3000");
    assert_eq!(tree.childs(TID, "cpu.max"), "3000 10000");
    share.lift_limit().unwrap();
    assert_eq!(tree.childs(TID, "cpu.max"), "max");
    share.end();
    assert_eq!(tree.has("cgroup.threads"), TID.to_string());
    assert_eq!(tree.has("cgroup.subtree_control"), "-cpu");
}

#[test]
fn the_controller_stays_on_for_children_until_the_last_one_ends() {
    let tree = Tree::new("last", "cpu", "");
    let one = give_below(&tree, TID);
    let two = give_below(&tree, TID + 1);
    one.end();
    assert_eq!(tree.has("cgroup.subtree_control"), "+cpu");
    two.end();
    assert_eq!(tree.has("cgroup.subtree_control"), "-cpu");
}

#[test]
fn a_controller_that_somebody_else_turned_on_stays_on() {
    let tree = Tree::new("others", "cpu io", "cpu\n");
    give_below(&tree, TID).end();
    assert_eq!(tree.has("cgroup.subtree_control"), "cpu\n");
}

/// As the next process finds it: only the records are known.
#[test]
fn shares_of_a_process_that_died_end_by_their_records() {
    let tree = Tree::new("died", "cpu", "");
    let records: Vec<String> = [TID, TID + 1]
        .map(|tid| {
            let share = second::plan_below(&tree.0, tid).unwrap();
            // A share that was only planned ends like one that was begun.
            if tid == TID {
                share.begin().unwrap();
            }
            share.record()
        })
        .into();
    second::forget_controller(&tree.0);
    let adopted: Vec<Share> = (TID..)
        .zip(&records)
        .filter_map(|(tid, record)| Share::adopt(tid, record))
        .collect();
    assert_eq!(
        adopted.iter().map(Share::record).collect::<Vec<_>>(),
        records
    );
    adopted[0].end();
    assert_eq!(tree.has("cgroup.threads"), TID.to_string());
    assert_eq!(tree.has("cgroup.subtree_control"), "+cpu");
    adopted[1].end();
    assert_eq!(tree.has("cgroup.threads"), TID.to_string(), "it never came");
    assert_eq!(tree.has("cgroup.subtree_control"), "-cpu");
}

#[test]
fn a_thread_whose_group_was_removed_goes_to_the_nearest_that_is_left() {
    let tree = Tree::new("nearest", "cpu", "cpu");
    let own = tree.0.join("portolan-1-4711");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("tasks"), format!("17\n{TID}\n")).unwrap();
    let record = format!(
        "first {}//{}/video/decoders",
        own.display(),
        tree.0.display()
    );
    Share::adopt(TID, &record).unwrap().end();
    assert_eq!(tree.has("tasks"), TID.to_string());
}

#[test]
fn a_thread_that_was_moved_since_stays_where_it_is() {
    let tree = Tree::new("moved", "cpu", "");
    let share = give_below(&tree, TID);
    tree.put(&format!("{}/cgroup.threads", name(TID)), "");
    share.end();
    assert_eq!(tree.has("cgroup.threads"), "");
}

#[test]
fn a_record_that_is_none_is_nobodys_share() {
    for record in ["", "first", "first /a/b", "third /a///b", "second"] {
        assert!(Share::adopt(TID, record).is_none(), "{record}");
    }
}

#[test]
fn a_group_without_the_controller_is_named_and_left_alone() {
    let tree = Tree::new("without", "memory pids", "");
    let refused = second::plan_below(&tree.0, TID).unwrap_err();
    assert!(matches!(refused, ShareError::NoController { .. }));
    assert!(refused.to_string().contains("portolan-share"), "{refused}");
    assert!(!tree.0.join(name(TID)).exists());
}

#[test]
fn a_group_that_ends_meanwhile_is_told() {
    let gone = Path::new("/nowhere/at/all");
    let refused = second::plan_below(gone, TID).unwrap_err();
    assert!(refused.to_string().contains("/nowhere/at/all"), "{refused}");
}

#[test]
fn no_rate_makes_a_quota_that_the_kernel_refuses() {
    for rate_ppm in [0, 1, 999, 10_000, 300_000, 1_000_000, u32::MAX] {
        for period in [100, 1_000, 33_000, 1_000_000, 4_194_303] {
            let Quota {
                quota_us,
                period_us,
            } = Quota::of(rate_ppm, period);
            assert!(quota_us >= LEAST_QUOTA_US, "{rate_ppm} {period}");
            assert!(
                (1_000..=1_000_000).contains(&period_us),
                "{rate_ppm} {period}"
            );
        }
    }
}

#[test]
fn a_share_at_the_root_takes_nobody_out_of_his_cgroup() {
    let told = "9:memory:/box\n2:cpu:/portolan-1-4712\n0::/a\n";
    assert_eq!(memberships(TID + 1, told), told, "it has no share");
    moved().insert(
        TID + 1,
        ("/portolan-1-4712".to_owned(), "/video".to_owned()),
    );
    let own = memberships(TID + 1, told);
    assert_eq!(own, "9:memory:/box\n2:cpu:/video\n0::/a\n");
    let elsewhere = "2:cpu:/other/portolan-1-4712\n";
    assert_eq!(
        memberships(TID + 1, elsewhere),
        elsewhere,
        "it was moved since"
    );
    moved().remove(&(TID + 1));
}
