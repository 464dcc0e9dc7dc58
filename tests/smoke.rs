//! The store from a user's side: a worker that was paused is refused, and a reopened store knows it.

use std::time::Duration;
use tidewall::*;

mod readme {
    include!("../examples/readme.rs");

    pub fn run() -> Result<(), Box<dyn std::error::Error>> {
        main()
    }
}

#[test]
fn the_example_of_the_readme_is_the_one_that_runs() {
    assert!(include_str!("../README.md").contains(include_str!("../examples/readme.rs")));
    let dir = tempfile::tempdir().unwrap();
    std::env::set_current_dir(dir.path()).unwrap();
    readme::run().unwrap();
    let db = Options::new().must_exist().open("data").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
    assert_eq!(jobs.prefix(b"7/").count(), 2);
    // A directory that is the current one is not removed everywhere.
    std::env::set_current_dir(std::env::temp_dir()).unwrap();
}

#[test]
fn a_paused_worker_is_fenced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    {
        let db = Db::open(&path).unwrap();
        let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
        let a = jobs.lease(b"7/").ttl(Duration::from_millis(5)).acquire().unwrap();
        jobs.put(a.token(), b"7/result", b"draft").unwrap();
        while a.is_live() {}
        let b = loop {
            if let Ok(b) = jobs.lease(b"7/").ttl(Duration::from_secs(5)).acquire() {
                break b;
            }
        };
        assert!(matches!(jobs.put(a.token(), b"7/result", b"late"), Err(Error::Fenced { .. })));
        jobs.put(b.token(), b"7/result", b"done").unwrap();
        assert_eq!(&*jobs.get(b"7/result").unwrap().unwrap(), b"done");
        assert_eq!(jobs.prefix(b"7/").count(), 1);
        for i in 0..1000 {
            jobs.put(b.token(), format!("7/{i}").as_bytes(), b"x").unwrap();
        }
        assert_eq!(jobs.iter().count(), 1001);
        println!("{:?}", db.stats());
        db.close().unwrap();
    }
    {
        let db = Db::open(&path).unwrap();
        println!("{:?}", db.report());
        let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
        assert_eq!(&*jobs.get(b"7/result").unwrap().unwrap(), b"done");
        assert_eq!(jobs.iter().count(), 1001);
        assert_eq!(jobs.mark(b"7/").unwrap().unwrap().get(), 2);
    }
}
